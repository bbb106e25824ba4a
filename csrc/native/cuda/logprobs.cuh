// Pieces of the log-prob kernels: a row's scale, the statistics of a run of vectors, and the gradient of one logit.
#pragma once
#include "common.cuh"
#include "rl_csrc/kernels_cuda.h"

namespace rl {

// What a kernel accumulates beside max and sum.
enum Mode { kDot = 1, kSquare = 2, kSoftcap = 4 };

// Below this exponent 2^t is 0 in float32; clamping there keeps 0 * t finite when a logit is -inf.
constexpr float kUnderflow = -200.f;

template <typename T>
__device__ __forceinline__ uint32_t neg_inf_word();
template <>
__device__ __forceinline__ uint32_t neg_inf_word<float>() { return 0xff800000u; }
template <>
__device__ __forceinline__ uint32_t neg_inf_word<__nv_bfloat16>() { return 0xff80ff80u; }
template <>
__device__ __forceinline__ uint32_t neg_inf_word<__half>() { return 0xfc00fc00u; }

template <typename T>
__device__ __forceinline__ uint4 neg_inf_vec() {
  const uint32_t w = neg_inf_word<T>();
  return make_uint4(w, w, w, w);
}

struct Scale {
  float log2;     // logit * log2 = t, the scaled logit in units of log 2
  float softcap;  // 0: none

  template <int MODE>
  __device__ __forceinline__ float cap(float x) const {
    if constexpr (MODE & kSoftcap) return softcap > 0.f ? softcap * tanhf(x / softcap) : x;
    return x;
  }
};

__device__ __forceinline__ Scale row_scale(const rl_logits& a, int64_t i) {
  const float temperature = a.temperature ? a.temperature[i] : a.scalar_temperature;
  return {kLog2e / temperature, a.softcap};
}

__device__ __forceinline__ int64_t logits_row(const rl_logits& a, int64_t i) { return a.row_index ? a.row_index[i] : i; }

__device__ __forceinline__ bool is_ignored(const rl_logits& a, int64_t label) {
  return a.has_ignore && label == a.ignore_index;
}

// max over packed words: two 16-bit elements per instruction, NaN wins.
template <typename T, int N>
__device__ __forceinline__ float raw_max(const uint4 (&v)[N]) {
  if constexpr (sizeof(T) == 4) {
    float m = -INFINITY;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      m = max_nan(m, max_nan(max_nan(__uint_as_float(v[i].x), __uint_as_float(v[i].y)),
                             max_nan(__uint_as_float(v[i].z), __uint_as_float(v[i].w))));
    }
    return m;
  } else if constexpr (sizeof(T) == 2) {
    using Pair = typename Element<T>::Pair;
    auto pair = [](const uint32_t& w) { return *reinterpret_cast<const Pair*>(&w); };
    Pair m = __hmax2_nan(__hmax2_nan(pair(v[0].x), pair(v[0].y)), __hmax2_nan(pair(v[0].z), pair(v[0].w)));
#pragma unroll
    for (int i = 1; i < N; ++i) {
      m = __hmax2_nan(m, __hmax2_nan(__hmax2_nan(pair(v[i].x), pair(v[i].y)), __hmax2_nan(pair(v[i].z), pair(v[i].w))));
    }
    return max_nan(Element<T>::to_float(m.x), Element<T>::to_float(m.y));
  }
}

// Add a tile of N vectors to a thread's running statistics; the tile's own sums start at zero.
template <typename T, int MODE, int N>
__device__ __forceinline__ void add_tile(Stats& st, const uint4 (&v)[N], const Scale& scale) {
  constexpr int k = Element<T>::kPerVec;
  const float max = max_nan(st.max, scale.cap<MODE>(raw_max<T, N>(v)) * scale.log2);
  const float safe = max == -INFINITY ? 0.f : max;
  float sum = 0.f, dot = 0.f, square = 0.f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float x[k];
    unpack_vec<T>(v[i], x);
#pragma unroll
    for (int j = 0; j < k; ++j) {
      float t = fmaf(scale.cap<MODE>(x[j]), scale.log2, -safe);
      if constexpr (MODE & kDot) t = max_nan(t, kUnderflow);
      const float e = exp2_fast(t);
      sum += e;
      if constexpr (MODE & kDot) dot = fmaf(e, t, dot);
      if constexpr (MODE & kSquare) square = fmaf(e, e, square);
    }
  }
  const float shift = max_nan(st.max - safe, kUnderflow);
  const float rescale = exp2_fast(shift);
  if constexpr (MODE & kDot) st.dot = fmaf(rescale, fmaf(shift, st.sum, st.dot), dot);
  if constexpr (MODE & kSquare) st.square = fmaf(rescale * rescale, st.square, square);
  st.sum = fmaf(rescale, st.sum, sum);
  st.max = max;
}

// Add one scaled logit.
__device__ __forceinline__ void add_one(Stats& st, float t) {
  if (t != -INFINITY) st = merge(st, Stats{t, 1.f, 0.f, 1.f});
}

// The columns of a row's last, partial vector.
template <typename T, int MODE>
__device__ __forceinline__ void add_tail(Stats& st, const uint4& v, int64_t index, int64_t size, const Scale& scale) {
  constexpr int k = Element<T>::kPerVec;
  float x[k];
  unpack_vec<T>(v, x);
#pragma unroll
  for (int j = 0; j < k; ++j)
    if (index * k + j < size) add_one(st, scale.cap<MODE>(x[j]) * scale.log2);
}

// One thread's share of a row: vectors thread, thread + step, ... below `size` columns.
template <typename T, int MODE, int UNROLL>
__device__ __forceinline__ Stats thread_stats(const RowReader<T>& row, int64_t size, const Scale& scale, int thread, int step) {
  constexpr int k = Element<T>::kPerVec;
  const int full = int(size / k);
  Stats st = empty_stats();
  const uint4 none = neg_inf_vec<T>();
  if constexpr (MODE & kSoftcap) {  // no filler: softcap would lift it from -inf
    for (int n = thread; n < full; n += step) {
      const uint4 v[1] = {row.shift == 0 ? row.aligned(n) : row.shifted(n)};
      add_tile<T, MODE>(st, v, scale);
    }
  } else if (row.shift == 0) {
    for (int first = thread; first < full; first += step * UNROLL) {
      uint4 v[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) v[u] = first + u * step < full ? row.aligned(first + u * step) : none;
      add_tile<T, MODE>(st, v, scale);
    }
  } else {
    for (int first = thread; first < full; first += step * UNROLL) {
      uint4 v[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) v[u] = first + u * step < full ? row.shifted(first + u * step) : none;
      add_tile<T, MODE>(st, v, scale);
    }
  }
  if (full * int64_t(k) < size && thread == full % step) add_tail<T, MODE>(st, row.shifted(full), full, size, scale);
  return st;
}

struct RowResult {
  float logprob, entropy, square, lse;
};

// `label` is the label's scaled logit in units of log 2.
__device__ __forceinline__ RowResult finish_row(const Stats& st, float label) {
  if (st.max == -INFINITY) return {-INFINITY, 0.f, 0.f, -INFINITY};
  const float log_sum = logf(st.sum);
  RowResult r;
  r.logprob = fmaf(label - st.max, kLn2, -log_sum);
  r.entropy = fmaf(-st.dot / st.sum, kLn2, log_sum);
  r.square = st.square / (st.sum * st.sum);
  r.lse = fmaf(st.max, kLn2, log_sum);
  return r;
}

// What the gradient of a row's logits needs; the gradients hold the factor 1 / temperature.
struct RowGrad {
  float label;       // gradient at the label's logit, by expm1
  float g, g_entropy;
  float entropy;
  float lse_log2;    // log-sum-exp in units of log 2
  bool is_zero;      // nothing to propagate: the logits are not looked at
};

__device__ __forceinline__ RowGrad make_grad(float g, float g_entropy, float logprob, float lse, float entropy, const Scale& scale) {
  const float inverse_temperature = scale.log2 * kLn2;
  RowGrad r;
  r.g = g * inverse_temperature;
  r.g_entropy = g_entropy * inverse_temperature;
  r.label = -r.g * expm1f(logprob);
  r.entropy = entropy;
  r.lse_log2 = lse * kLog2e;
  r.is_zero = (g == 0.f && g_entropy == 0.f) || lse == -INFINITY;
  return r;
}

template <int MODE>
__device__ __forceinline__ float logit_grad(float x, bool is_label, const RowGrad& r, const Scale& scale) {
  const float capped = scale.cap<MODE>(x);
  float t = fmaf(capped, scale.log2, -r.lse_log2);
  if constexpr (MODE & kDot) t = max_nan(t, kUnderflow);
  const float p = exp2_fast(t);
  float grad = is_label ? r.label : -r.g * p;
  if constexpr (MODE & kDot) grad -= r.g_entropy * p * fmaf(t, kLn2, r.entropy);
  if constexpr (MODE & kSoftcap) {
    if (scale.softcap > 0.f) {
      const float y = capped / scale.softcap;
      grad *= fmaf(-y, y, 1.f);
    }
  }
  return grad;
}

// Gradient of vector `index` of a row whose label is column `label`.
template <typename T, int MODE>
__device__ __forceinline__ void vec_grad(const uint4& v, int first, int label, const RowGrad& r, const Scale& scale,
                                         float (&out)[Element<T>::kPerVec]) {
  constexpr int k = Element<T>::kPerVec;
  float x[k];
  unpack_vec<T>(v, x);
  const int at = label - first;
#pragma unroll
  for (int j = 0; j < k; ++j) out[j] = logit_grad<MODE>(x[j], false, r, scale);
  if (at >= 0 && at < k) {
#pragma unroll
    for (int j = 0; j < k; ++j)
      if (at == j) out[j] = logit_grad<MODE>(x[j], true, r, scale);
  }
}

}  // namespace rl
