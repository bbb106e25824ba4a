#pragma once
#include <pybind11/pybind11.h>

namespace rl {
void bind_digest(pybind11::module_& m);
void bind_frames(pybind11::module_& m);
void bind_delta(pybind11::module_& m);
void bind_rows(pybind11::module_& m);
void bind_pages(pybind11::module_& m);
void bind_pipeline(pybind11::module_& m);
}  // namespace rl
