// How tensors and Python buffers cross the binding: torch's DLPack C exchange table in, views with a counted owner out.
#pragma once
#include <Python.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>

namespace rl {

// The parts of DLPack 1.x (its ABI) that are used here.
namespace dl {
struct Device { std::int32_t type, id; };
struct DataType { std::uint8_t code, bits; std::uint16_t lanes; };
struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct Version { std::uint32_t major, minor; };
struct Managed {
  Version version;
  void* manager_ctx;
  void (*deleter)(Managed*);
  std::uint64_t flags;
  Tensor tensor;
};
struct Exchange {
  Version version;
  void* previous;
  void* allocate;
  void* managed_from_object;
  int (*managed_to_object)(Managed*, void**);
  int (*tensor_from_object)(void*, Tensor*);
  void* current_stream;
};
constexpr std::int32_t kCpu = 1, kCuda = 2;
constexpr std::uint64_t kReadOnly = 1;
}  // namespace dl

// Raises rl_csrc.errors.<name>(message).
[[noreturn]] void raise(const char* name, const std::string& message);

// torch's exchange table; raises RuntimeError if this torch has none.
const dl::Exchange& exchange();

// Whether the object is exactly a torch.Tensor or a torch.nn.Parameter (a subclass may not have plain memory).
bool is_plain_tensor(PyObject* object);

bool is_contiguous(const dl::Tensor& tensor);

// Whether a tensor is to be negated when it is read, as the imaginary part of a conjugated one: DLPack does not say.
bool is_negated(PyObject* tensor);
std::uint64_t num_bytes(const dl::Tensor& tensor);  // of the elements, strides aside
inline unsigned char* address(const dl::Tensor& t) { return static_cast<unsigned char*>(t.data) + t.byte_offset; }

// Memory borrowed from a Python object, released under the GIL when the last share goes.
struct Memory {
  unsigned char* data = nullptr;
  std::size_t nbytes = 0;
  bool readonly = false;

  virtual ~Memory() = default;
};

// The bytes of a contiguous CPU tensor or of an object with the buffer protocol; TypeError, BufferError or ArgumentError else.
std::shared_ptr<Memory> borrow(pybind11::handle object, bool writable);

// A new torch tensor over `data`, which lives as long as `owner`. dtype is a code of FRAMES.md.
pybind11::object make_tensor(void* data, std::uint8_t dtype, const std::int64_t* shape, unsigned ndim,
                             std::shared_ptr<void> owner, bool readonly);

}  // namespace rl
