#include "exchange.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "rl_csrc/frames.h"

namespace py = pybind11;

namespace rl {
namespace {

struct Torch {
  const dl::Exchange* table;
  PyObject* tensor_type;
  PyObject* parameter_type;
};

Torch load() {
  // Strong references for the life of the process: the interpreter may be gone before static destructors run.
  py::module_ torch = py::module_::import("torch");
  py::object tensor = torch.attr("Tensor");
  py::object capsule = py::getattr(tensor, "__dlpack_c_exchange_api__", py::none());
  auto* table = capsule.is_none() ? nullptr
                                  : static_cast<const dl::Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!table || table->version.major != 1 || !table->tensor_from_object) {
    PyErr_Clear();
    throw std::runtime_error("this torch has no DLPack 1.x exchange table (torch.Tensor.__dlpack_c_exchange_api__): rl-csrc needs torch 2.11 or newer");
  }
  return {table, tensor.release().ptr(), py::object(torch.attr("nn").attr("Parameter")).release().ptr()};
}

const Torch& torch() {
  static const Torch loaded = load();  // under the GIL; a throw leaves it to be tried again
  return loaded;
}

struct BorrowedBuffer final : Memory {
  Py_buffer view{};
  ~BorrowedBuffer() override {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    PyBuffer_Release(&view);
  }
};

struct BorrowedTensor final : Memory {
  PyObject* tensor = nullptr;
  ~BorrowedTensor() override {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    Py_XDECREF(tensor);
  }
};

struct View {
  dl::Managed managed;
  std::shared_ptr<void> owner;
  std::int64_t extents[1];  // shape, then strides
};

void delete_view(dl::Managed* managed) {
  auto* view = static_cast<View*>(managed->manager_ctx);
  view->~View();
  std::free(view);
}

}  // namespace

void raise(const char* name, const std::string& message) {
  py::object type = py::module_::import("rl_csrc.errors").attr(name);
  PyErr_SetString(type.ptr(), message.c_str());
  throw py::error_already_set();
}

const dl::Exchange& exchange() { return *torch().table; }

bool is_plain_tensor(PyObject* object) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == torch().tensor_type || type == torch().parameter_type;
}

bool is_negated(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  const auto answer = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor, name));
  if (!answer) throw py::error_already_set();
  return answer.ptr() != Py_False;
}

bool is_contiguous(const dl::Tensor& t) {
  std::int64_t expected = 1;
  bool packed = true;
  for (std::int32_t d = t.ndim - 1; d >= 0; --d) {
    if (t.shape[d] == 0) return true;
    if (t.strides && t.shape[d] != 1) packed &= t.strides[d] == expected;
    expected *= t.shape[d];
  }
  return packed;
}

std::uint64_t num_bytes(const dl::Tensor& t) {
  std::uint64_t n = (std::uint64_t{t.dtype.bits} * t.dtype.lanes + 7) / 8;
  for (std::int32_t d = 0; d < t.ndim; ++d) n *= static_cast<std::uint64_t>(t.shape[d]);
  return n;
}

std::shared_ptr<Memory> borrow(py::handle object, bool writable) {
  if (is_plain_tensor(object.ptr())) {
    dl::Tensor t;
    if (exchange().tensor_from_object(object.ptr(), &t)) throw py::error_already_set();
    if (t.device.type != dl::kCpu || !is_contiguous(t)) raise("ArgumentError", "the tensor must be contiguous and on the CPU: give tensor.cpu().contiguous()");
    auto memory = std::make_shared<BorrowedTensor>();
    memory->data = address(t);
    memory->nbytes = num_bytes(t);
    memory->tensor = object.inc_ref().ptr();
    return memory;
  }
  auto memory = std::make_shared<BorrowedBuffer>();
  if (PyObject_GetBuffer(object.ptr(), &memory->view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE)) throw py::error_already_set();
  memory->data = static_cast<unsigned char*>(memory->view.buf);
  memory->nbytes = static_cast<std::size_t>(memory->view.len);
  memory->readonly = memory->view.readonly;
  return memory;
}

py::object make_tensor(void* data, std::uint8_t dtype, const std::int64_t* shape, unsigned ndim, std::shared_ptr<void> owner,
                       bool readonly) {
  const dl::Exchange& table = exchange();
  void* raw = std::calloc(1, sizeof(View) + 2 * ndim * sizeof(std::int64_t));
  if (!raw) throw std::bad_alloc();
  View* view = new (raw) View{};
  view->owner = std::move(owner);
  std::int64_t* extents = view->extents;
  std::int64_t stride = 1;
  for (unsigned d = ndim; d-- > 0;) {
    extents[d] = shape[d];
    extents[ndim + d] = stride;
    stride *= shape[d] > 1 ? shape[d] : 1;
  }
  const frames::DType& type = frames::kDTypes[dtype];
  view->managed = {{1, 0}, view, delete_view, readonly ? dl::kReadOnly : 0, {}};
  view->managed.tensor = {data, {dl::kCpu, 0}, static_cast<std::int32_t>(ndim), {type.code, type.bits, type.lanes}, extents, extents + ndim, 0};
  void* out = nullptr;
  if (table.managed_to_object(&view->managed, &out)) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(out));
}

}  // namespace rl
