// What each part of the CPU module adds to it.
#pragma once
#include <pybind11/pybind11.h>

namespace rl {
void bind_softmax(pybind11::module_& m);  // native/cpu
void bind_losses(pybind11::module_& m);
void bind_copies(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_decoder(pybind11::module_& m);
void bind_buffers(pybind11::module_& m);  // native/buffers
}  // namespace rl
