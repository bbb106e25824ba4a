// Huge pages for memory that is about to be written for the first time.
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "buffers.h"
#include "tensor_arg.h"

namespace rl {
namespace {

// Advises the whole huge pages inside the tensor's memory; false where there are none, or the system does not take the advice.
bool advise_huge_pages(pybind11::handle tensor) {
  TensorArg arg(tensor, "tensor");
  arg.on_cpu().dense();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;
  const auto first = reinterpret_cast<std::uintptr_t>(arg.data()), last = first + static_cast<std::uintptr_t>(arg.nbytes());
  const std::uintptr_t begin = (first + kHugePage - 1) / kHugePage * kHugePage, end = last / kHugePage * kHugePage;
  return begin < end && madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
#else
  return false;
#endif
}

}  // namespace

void bind_pages(pybind11::module_& m) { m.def("advise_huge_pages", &advise_huge_pages); }

}  // namespace rl
