#pragma once

// What the bindings of the CPU kernels share: arguments checked and taken apart. Kernels run without the GIL, outputs come from torch.
#include <pybind11/pybind11.h>

#include <utility>

#include "rl_csrc/kernels.h"
#include "tensor_arg.h"

namespace rl {

using Handle = pybind11::handle;

// Without the GIL, where the work is worth the price of letting it go.
template <class Body>
auto unlocked(std::int64_t work, const Body& body) {
  if (work < 1 << 14) return body();
  pybind11::gil_scoped_release released;
  return body();
}

std::int32_t float_type(const TensorArg& arg);
std::int64_t rows_stride(const TensorArg& arg);

// Everything about the rows but their memory.
rl_logits scored_rows(Handle labels, Handle temperature, double softcap, Handle ignore_index, std::int64_t vocab_start);

rl_logits logit_rows(Handle logits, Handle labels, Handle temperature, double softcap, Handle ignore_index, Handle row_index,
                     std::int64_t vocab_start);

// Raises where a kernel found the label before `bad` out of range; 0 is none.
void check_labels(std::int64_t bad, const rl_logits& in);

struct GradientRows {
  void* data;
  std::int64_t stride, rows;
};

GradientRows gradient_rows(Handle out, Handle logits, const rl_logits& in);

// Rows that no label scores have gradient 0; a row scored twice would need a sum that the kernels do not make.
void clear_unscored(const rl_logits& in, const GradientRows& g);

// cu_seqlens [B + 1] and B.
std::pair<const std::int64_t*, std::int64_t> offsets(Handle cu_seqlens, const char* name, std::int64_t tokens);

}  // namespace rl
