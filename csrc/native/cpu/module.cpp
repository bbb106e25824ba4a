// The `_cpu` module: what was built, the CPU kernels, and the buffers.
#include <pybind11/pybind11.h>

#include "bindings.h"
#include "isa.h"

namespace py = pybind11;

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "rl-csrc, CPU half: kernels, tensor frames and transfer buffers.";
  m.attr("compiler") = __VERSION__;
  m.def("kernel_level", &rl::isa_level, "Level of the CPU kernels in use: 0 baseline, 1 AVX2, 2 AVX-512, 3 AVX-512 with bf16 products, 4 with AMX tiles.");
  m.def("set_kernel_level", &rl::set_isa_level, "Lower the level (-1: the machine's best); returns the one in force. For tests.");
  rl::bind_softmax(m);
  rl::bind_losses(m);
  rl::bind_copies(m);
  rl::bind_attention(m);
  rl::bind_decoder(m);
  rl::bind_buffers(m);
}
