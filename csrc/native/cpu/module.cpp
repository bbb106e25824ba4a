// The `_cpu` module: what was built, the CPU kernels, and the buffers.
#include <pybind11/pybind11.h>

#include "bindings.h"

namespace py = pybind11;

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "rl-csrc, CPU half: kernels, tensor frames and transfer buffers.";
  m.attr("compiler") = __VERSION__;
  rl::bind_kernels(m);
  rl::bind_attention(m);
  rl::bind_decoder(m);
  rl::bind_buffers(m);
}
