// rl_loss_spec as a Python class whose constructor takes every field by name. For both modules.
#pragma once
#include <pybind11/pybind11.h>

#include <string>

#include "rl_csrc/loss_spec.h"

namespace rl {

inline rl_loss_spec make_loss_spec(const pybind11::kwargs& fields) {
  namespace py = pybind11;
  rl_loss_spec spec{};
  std::size_t known = 0;
  const auto take = [&](const char* name) {
    if (!fields.contains(name)) throw py::type_error(std::string("LossSpec wants ") + name + ": rl_csrc.reference.LossSpec has it?");
    ++known;
    return fields[name];
  };
#define RL_TAKE_CODE(name) spec.name = take(#name).cast<std::int32_t>();
#define RL_TAKE_NUMBER(name) spec.name = take(#name).cast<float>();
  RL_LOSS_CODES(RL_TAKE_CODE)
  RL_LOSS_NUMBERS(RL_TAKE_NUMBER)
#undef RL_TAKE_CODE
#undef RL_TAKE_NUMBER
  if (known != fields.size()) throw py::type_error("LossSpec was given a field that include/rl_csrc/loss_spec.h does not list.");
  return spec;
}

inline void bind_loss_spec(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<rl_loss_spec>(m, "LossSpec", py::module_local()).def(py::init(&make_loss_spec));
}

}  // namespace rl
