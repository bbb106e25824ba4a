#include "tensor_arg.h"

namespace py = pybind11;

namespace rl {
namespace {

const dl::Exchange* table_or_null() {
  static const dl::Exchange* table = [] {
    try {
      return &exchange();
    } catch (const std::runtime_error&) {
      return static_cast<const dl::Exchange*>(nullptr);
    }
  }();
  return table;
}

dl::DataType type_named(const std::string& name) {
  static const struct {
    const char* name;
    dl::DataType type;
  } known[] = {{"torch.float32", {2, 32, 1}}, {"torch.bfloat16", {4, 16, 1}}, {"torch.float16", {2, 16, 1}}, {"torch.float64", {2, 64, 1}},
               {"torch.int64", {0, 64, 1}},   {"torch.int32", {0, 32, 1}},    {"torch.int16", {0, 16, 1}},   {"torch.int8", {0, 8, 1}},
               {"torch.uint8", {1, 8, 1}},    {"torch.bool", {6, 8, 1}}};
  for (const auto& k : known)
    if (name == k.name) return k.type;
  return {255, 0, 0};
}

}  // namespace

const char* dtype_name(const dl::DataType& t) {
  switch (t.code) {
    case 0: return t.bits == 64 ? "int64" : t.bits == 32 ? "int32" : t.bits == 16 ? "int16" : "int8";
    case 1: return t.bits == 8 ? "uint8" : "an unsigned integer";
    case 2: return t.bits == 64 ? "float64" : t.bits == 32 ? "float32" : "float16";
    case 4: return "bfloat16";
    case 6: return "bool";
    default: return "another type";
  }
}

TensorArg::TensorArg(py::handle object, const char* name) : name_(name) {
  if (const dl::Exchange* table = table_or_null(); table && is_plain_tensor(object.ptr())) {
    if (table->tensor_from_object(object.ptr(), &tensor_)) throw py::error_already_set();
    return;
  }
  read_attributes(object);
}

void TensorArg::read_attributes(py::handle object) {
  if (!py::hasattr(object, "data_ptr")) raise("ArgumentError", std::string(name_) + " must be a torch.Tensor, not " + Py_TYPE(object.ptr())->tp_name + ".");
  const py::tuple shape = py::tuple(object.attr("shape")), strides = py::tuple(object.attr("stride")());
  if (shape.size() > kMaxDims) raise("ArgumentError", std::string(name_) + " has more than 8 dimensions.");
  tensor_.data = reinterpret_cast<void*>(object.attr("data_ptr")().cast<std::uintptr_t>());
  tensor_.ndim = static_cast<std::int32_t>(shape.size());
  for (std::size_t d = 0; d < shape.size(); ++d) {
    extents_[d] = shape[d].cast<std::int64_t>();
    extents_[kMaxDims + d] = strides[d].cast<std::int64_t>();
  }
  tensor_.shape = extents_;
  tensor_.strides = extents_ + kMaxDims;
  tensor_.dtype = type_named(py::str(object.attr("dtype")).cast<std::string>());
  if (object.attr("is_cpu").cast<bool>())
    tensor_.device = {dl::kCpu, 0};
  else if (object.attr("is_cuda").cast<bool>())
    tensor_.device = {dl::kCuda, object.attr("get_device")().cast<std::int32_t>()};
}

std::int64_t TensorArg::numel() const {
  std::int64_t n = 1;
  for (int d = 0; d < ndim(); ++d) n *= size(d);
  return n;
}

std::string TensorArg::describe() const {
  std::string text = std::string(dtype_name(tensor_.dtype)) + " [";
  for (int d = 0; d < ndim(); ++d) text.append(d ? ", " : "").append(std::to_string(size(d)));
  return text + "]";
}

void TensorArg::refuse(const std::string& wanted) const {
  raise("ArgumentError", std::string(name_) + " is " + describe() + "; wanted " + wanted + ".");
}

TensorArg& TensorArg::on_cpu() {
  if (tensor_.device.type != dl::kCpu) refuse("a tensor on the CPU, as the other arguments are");
  return *this;
}

TensorArg& TensorArg::shaped(std::initializer_list<std::int64_t> shape) {
  bool same = static_cast<int>(shape.size()) == ndim();
  int d = 0;
  for (const std::int64_t n : shape) {
    same = same && (n < 0 || n == size(d));
    ++d;
  }
  if (same) return *this;
  std::string wanted = "shape [";
  for (const std::int64_t n : shape) wanted.append(wanted.back() == '[' ? "" : ", ").append(n < 0 ? "any" : std::to_string(n));
  refuse(wanted + "]");
}

TensorArg& TensorArg::dense() {
  if (!contiguous()) refuse("contiguous memory");
  return *this;
}

}  // namespace rl
