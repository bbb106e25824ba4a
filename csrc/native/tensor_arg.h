// Tensors as arguments of a kernel: read through torch's exchange table (or, where there is none, through the tensor's own
// attributes), then checked. Errors are rl_csrc.errors.ArgumentError with the argument's name.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "buffers/exchange.h"

namespace rl {

// A checked view of a tensor's memory; valid while the Python tensor lives and keeps its shape.
class TensorArg {
 public:
  TensorArg(pybind11::handle object, const char* name);

  const char* name() const { return name_; }
  int ndim() const { return tensor_.ndim; }
  std::int64_t size(int d) const { return tensor_.shape[d]; }
  std::int64_t stride(int d) const { return tensor_.strides ? tensor_.strides[d] : 1; }
  std::int64_t numel() const;
  std::int64_t nbytes() const { return static_cast<std::int64_t>(num_bytes(tensor_)); }
  bool contiguous() const { return is_contiguous(tensor_); }
  void* data() const { return address(tensor_); }
  const dl::DataType& dtype() const { return tensor_.dtype; }
  const dl::Device& device() const { return tensor_.device; }
  std::string describe() const;  // "float32 [3, 4]"

  TensorArg& on_cpu();
  TensorArg& shaped(std::initializer_list<std::int64_t> shape);  // -1: any
  TensorArg& dense();                                            // contiguous
  [[noreturn]] void refuse(const std::string& wanted) const;

 private:
  static constexpr int kMaxDims = 8;
  void read_attributes(pybind11::handle object);

  dl::Tensor tensor_{};
  const char* name_;
  std::int64_t extents_[2 * kMaxDims];
};

template <class T>
constexpr dl::DataType dtype_of();
template <> constexpr dl::DataType dtype_of<float>() { return {2, 32, 1}; }
template <> constexpr dl::DataType dtype_of<double>() { return {2, 64, 1}; }
template <> constexpr dl::DataType dtype_of<std::int64_t>() { return {0, 64, 1}; }
template <> constexpr dl::DataType dtype_of<std::uint8_t>() { return {6, 8, 1}; }  // bool

const char* dtype_name(const dl::DataType& type);

// The address of a dense CPU tensor of T with `size` elements (any if -1); nullptr for None.
template <class T>
T* elements(pybind11::handle object, const char* name, std::int64_t size = -1) {
  if (object.is_none()) return nullptr;
  TensorArg arg(object, name);
  const dl::DataType want = dtype_of<T>();
  if (arg.dtype().code != want.code || arg.dtype().bits != want.bits) arg.refuse(std::string("dtype ") + dtype_name(want));
  arg.on_cpu().dense();
  if (size >= 0 && arg.numel() != size) arg.refuse(std::to_string(size) + " elements");
  return static_cast<T*>(arg.data());
}

}  // namespace rl
