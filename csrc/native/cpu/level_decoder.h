// The parts of a decoder's pass. Each decoder_*.cpp defines RL_DECODER and includes this file; the compile options of that file
// choose the instructions. Nothing here may come from a std template: see level.h.
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <stdint.h>

#include "cpu/decoder.h"

namespace rl {
namespace {
#include "cpu/vec.h"

#if defined(__AVX512F__)
constexpr int kMostRows = 8;  // rows of a tile: its sums, a step's weights and a number of x fit in the registers
#else
constexpr int kMostRows = 6;
#endif
constexpr int kTileColumns = 2 * kLanes;
constexpr int64_t kStep = 256;  // inputs whose products are summed in registers before they are added to `out`

// out[r, 0:kTileColumns] (+)= sum over k of x[r, k] * w[k], for kRows rows. Every sum runs over k in order, whatever kRows is.
template <int kRows>
RL_INLINE void tile(const float* x, int64_t x_stride, const float* w, int64_t size, float* out, int64_t out_stride, const float* bias,
                    bool adds) {
  vf sums[kRows][2] = {};
  for (int64_t k = 0; k < size; ++k) {
    const vf left = load(w + k * RL_PANEL), right = load(w + k * RL_PANEL + kLanes);
    for (int r = 0; r < kRows; ++r) {
      const vf number = splat(x[r * x_stride + k]);
      sums[r][0] = fma(number, left, sums[r][0]);
      sums[r][1] = fma(number, right, sums[r][1]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int half = 0; half < 2; ++half) {
      float* at = out + r * out_stride + half * kLanes;
      vf sum = sums[r][half];
      if (bias) sum = sum + load(bias + half * kLanes);
      if (adds) sum = sum + load(at);
      store(at, sum);
    }
}

template <int kRows>
RL_INLINE void tile_of(int64_t rows, const float* x, int64_t x_stride, const float* w, int64_t size, float* out, int64_t out_stride,
                       const float* bias, bool adds) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return tile_of<kRows - 1>(rows, x, x_stride, w, size, out, out_stride, bias, adds);
  }
  tile<kRows>(x, x_stride, w, size, out, out_stride, bias, adds);
}

// One panel over all rows. Its weights stay in the nearest cache from row to row.
void panel_rows(const LinearWork* work, const float* panel, const float* bias, float* out) {
  const int64_t inputs = work->linear->inputs;
  for (int64_t k = 0; k < inputs; k += kStep) {
    const int64_t size = inputs - k < kStep ? inputs - k : kStep;
    for (int column = 0; column < RL_PANEL; column += kTileColumns)
      for (int64_t row = 0; row < work->rows; row += kMostRows)
        tile_of<kMostRows>(work->rows - row < kMostRows ? work->rows - row : kMostRows, work->x + row * work->x_stride + k, work->x_stride,
                           panel + k * RL_PANEL + column, size, out + row * work->out_stride + column, work->out_stride,
                           bias && k == 0 ? bias + column : nullptr, work->adds || k > 0);
  }
}

void linear(const LinearWork* work) {
  const rl_packed_linear* of = work->linear;
  for (int64_t panel = work->first; panel < work->last; ++panel) {
    const int64_t column = panel * RL_PANEL, rest = of->outputs - column;
    float padded[RL_PANEL] = {};
    const float* bias = of->bias ? of->bias + column : nullptr;
    if (bias && rest < RL_PANEL) {
      for (int64_t i = 0; i < rest; ++i) padded[i] = bias[i];
      bias = padded;
    }
    panel_rows(work, of->panels + column * of->inputs, bias, work->out + column);
  }
}

void norm(const float* x, const float* scales, int64_t size, float eps, float* out) {
  vf sums{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sums = fma(load(x + i), load(x + i), sums);
  float sum = add_lanes(sums);
  for (; i < size; ++i) sum += x[i] * x[i];
  const float inverse = 1.0f / __builtin_sqrtf(sum / (float)size + eps);
  for (i = 0; i + kLanes <= size; i += kLanes) store(out + i, load(x + i) * splat(inverse) * load(scales + i));
  for (; i < size; ++i) out[i] = x[i] * inverse * scales[i];
}

void rotate(float* head, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const vf a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
    store(head + i, a * c - b * s);
    store(head + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = head[i], b = head[half + i];
    head[i] = a * cos[i] - b * sin[i];
    head[half + i] = b * cos[i] + a * sin[i];
  }
}

RL_INLINE vf gated(vf gate, vf up) {  // silu(gate) * up
  const vf bounded = max_keeping_nan(splat(-126.0f), gate * splat(kLog2e));  // 2^126 is the most that every level can make
  return gate / (splat(1.0f) + exp2v(-bounded)) * up;
}

void gate(float* gate_up, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(gate_up + i, gated(load(gate_up + i), load(gate_up + size + i)));
  if (i == size) return;
  float rest[2][kLanes] = {};
  for (int j = 0; j < kLanes && i + j < size; ++j) rest[0][j] = gate_up[i + j], rest[1][j] = gate_up[size + i + j];
  const vf last = gated(load(rest[0]), load(rest[1]));
  for (int j = 0; j < kLanes && i + j < size; ++j) gate_up[i + j] = last[j];
}

}  // namespace

const DecoderLevel& RL_DECODER() {
  static constexpr DecoderLevel parts{linear, norm, rotate, gate};
  return parts;
}

}  // namespace rl
