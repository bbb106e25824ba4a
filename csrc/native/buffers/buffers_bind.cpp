// Binds the buffers into `_cpu`: one function per file of this folder.
#include "bindings.h"
#include "buffers.h"
#include "isa.h"

namespace rl {
void bind_buffers(pybind11::module_& m) {
  m.def("isa", [] { return static_cast<int>(isa()); }, "Instruction set in use by the buffers: 0 baseline, 1 AVX2, 2 AVX-512.");
  m.def("set_isa", [](int level) { return static_cast<int>(set_isa(level)); }, "Lower it (or -1: the machine's best); returns the level in force.");
  bind_digest(m);
  bind_frames(m);
  bind_delta(m);
  bind_rows(m);
  bind_pages(m);
  bind_pipeline(m);
}
}  // namespace rl
