// What a decoder's pass needs at each instruction-set level, as plain functions over rows of float32.
#pragma once
#include "rl_csrc/decoder.h"

namespace rl {

// Rows [0, rows) of x through panels [first, last) of a linear layer. Rows of `out` have room for whole panels.
struct LinearWork {
  const rl_packed_linear* linear;
  const float* x;
  int64_t x_stride, rows, first, last;
  float* out;
  int64_t out_stride;
  bool adds;  // to what stands in `out`
};

struct DecoderLevel {
  void (*linear)(const LinearWork* work);
  void (*norm)(const float* x, const float* scales, int64_t size, float eps, float* out);  // RMSNorm; out may be x
  void (*rotate)(float* head, const float* cos, const float* sin, int64_t half);
  void (*gate)(float* gate_up, int64_t size);  // [2 * size] to silu(gate) * up in the first half
};

const DecoderLevel& decoder_baseline();
const DecoderLevel& decoder_avx2();
const DecoderLevel& decoder_avx512();

}  // namespace rl
