#include "buffers.h"
#include "exchange.h"
#include "rl_csrc/digest.h"

namespace py = pybind11;

namespace rl {
namespace {

constexpr std::size_t kReleaseGil = 64 << 10;  // below this, giving the GIL away costs more than the work

std::uint64_t sum_object(py::handle object, std::uint64_t offset) {
  const auto memory = borrow(object, false);
  if (memory->nbytes < kReleaseGil) return digest_sum(memory->data, memory->nbytes, offset / 8);
  py::gil_scoped_release release;
  return digest_sum(memory->data, memory->nbytes, offset / 8);
}

std::uint64_t digest_object(py::handle object) {
  const auto memory = borrow(object, false);
  if (memory->nbytes < kReleaseGil) return digest_finish(digest_sum(memory->data, memory->nbytes, 0), memory->nbytes);
  py::gil_scoped_release release;
  return digest_finish(digest_sum(memory->data, memory->nbytes, 0), memory->nbytes);
}

}  // namespace

void bind_digest(py::module_& m) {
  m.def("digest", &digest_object, py::arg("data"));
  m.def("digest_sum", &sum_object, py::arg("data"), py::arg("offset"));
  m.def("digest_finish", &digest_finish, py::arg("total"), py::arg("nbytes"));
}

}  // namespace rl
