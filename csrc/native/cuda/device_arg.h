// Tensors as arguments of a launch: read by TensorArg, and refused where a kernel would read what is not there. A shape can be
// checked by Python at no cost, and is; a pointer to host memory, to another device or to other elements cannot, and is fatal.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "rl_csrc/kernels_cuda.h"
#include "tensor_arg.h"

namespace rl {

// Becomes rl_csrc.errors.ArgumentError; may be thrown without the GIL.
struct Refused : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A tensor on a CUDA device, or None.
class DeviceArg {
 public:
  DeviceArg() = default;
  DeviceArg(const DeviceArg&) = delete;

  void read(pybind11::handle object) {
    if (!object.is_none()) tensor_.emplace(object, "a tensor of a CUDA kernel");
  }

  // The address on the current device; nullptr for None. T other than void: contiguous elements of that type.
  template <class T>
  T* as(const char* name) const {
    if (!tensor_) return nullptr;
    if (tensor_->device().type != kDevice) refuse(name, "a tensor on the GPU, as the other arguments are");
    int current = 0;
    if (const int status = rl_cuda_current_device(&current)) throw std::runtime_error(rl_cuda_error_text(status));
    if (tensor_->device().id != current)
      refuse(name, "one on cuda:" + std::to_string(current) + ", as the first tensor is, not on cuda:" + std::to_string(tensor_->device().id));
    if constexpr (!std::is_void_v<T>) {
      if (!is_element<T>(tensor_->dtype())) refuse(name, std::string("elements of type ") + element_name<T>());
      if (!tensor_->contiguous()) refuse(name, "contiguous memory");
    }
    return static_cast<T*>(tensor_->data());
  }

 private:
#ifdef RL_CSRC_EMULATED
  static constexpr auto kDevice = dl::kCpu;
#else
  static constexpr auto kDevice = dl::kCuda;
#endif

  // Words without a meaning of their own (uint32, uint64: counters, masks, sums) may be any integers of their size.
  template <class T>
  static bool is_element(const dl::DataType& type) {
    if (type.bits != 8 * sizeof(T) || type.lanes != 1) return false;
    if constexpr (std::is_floating_point_v<T>) return type.code == 2;
    if constexpr (sizeof(T) == 1) return type.code == 6 || type.code == 1;
    return type.code <= 1;
  }

  template <class T>
  static const char* element_name() {
    if constexpr (std::is_floating_point_v<T>) return sizeof(T) == 4 ? "float32" : "float64";
    return sizeof(T) == 1 ? "bool or uint8" : sizeof(T) == 4 ? "int32" : "int64";
  }

  [[noreturn]] void refuse(const char* name, const std::string& wanted) const {
    throw Refused(std::string(name) + " is " + tensor_->describe() + "; wanted " + wanted + ".");
  }

  std::optional<TensorArg> tensor_;
};

}  // namespace rl

namespace pybind11::detail {
template <>
struct type_caster<rl::DeviceArg> {
  PYBIND11_TYPE_CASTER(rl::DeviceArg, const_name("torch.Tensor | None"));
  bool load(handle object, bool) {
    value.read(object);
    return true;
  }
};
}  // namespace pybind11::detail
