// A row of logits held in registers becomes its gradient: what is read beside it, its statistics, and how it is written.
#pragma once
#include "logprobs.cuh"
#include "loss.cuh"

namespace rl {

// A row of gradients, whose type is the logits' own or, for float32 logits, any. WHOLE: only whole, aligned vectors are written.
template <typename T, bool WHOLE>
struct RowWriter {
  char* row;
  int dtype;
  bool aligned;  // to whole vectors
  static constexpr int k = Element<T>::kPerVec;

  __device__ RowWriter(const rl_fused_out& out, int64_t index) : dtype(out.grad_dtype) {
    const int size = sizeof(T) == 4 && dtype == RL_F32 ? 4 : 2;
    row = static_cast<char*>(out.grad_logits) + index * out.grad_stride * size;
    aligned = (reinterpret_cast<uintptr_t>(row) & (k * size - 1)) == 0;
  }

  template <typename Out>
  __device__ __forceinline__ void write_as(int first, int size, const float (&x)[k]) const {
    Out* to = reinterpret_cast<Out*>(row) + first;
    if (WHOLE || (aligned && first + k <= size)) {
      store_vec<T, Out>(to, x);
      return;
    }
    if constexpr (!WHOLE) {
#pragma unroll
      for (int j = 0; j < k; ++j)
        if (first + j < size) to[j] = Element<Out>::from_float(x[j]);
    }
  }

  __device__ __forceinline__ void write(int first, int size, const float (&x)[k]) const {
    if constexpr (sizeof(T) == 2) {
      write_as<T>(first, size, x);
    } else if (dtype == RL_F32) {
      write_as<float>(first, size, x);
    } else if (dtype == RL_BF16) {
      write_as<__nv_bfloat16>(first, size, x);
    } else {
      write_as<__half>(first, size, x);
    }
  }
};

// What a row's gradient reads beside its logits, fetched before the logits are waited for.
struct RowInputs {
  float label_x, old, advantage, ref, weight, share;
};

template <typename T>
__device__ __forceinline__ RowInputs row_inputs(const rl_logits& a, const rl_loss_tokens& tokens, const rl_fused_out& out, int64_t i,
                                                int64_t label, const T* src) {
  RowInputs r;
  r.label_x = label >= 0 && label < a.vocab ? Element<T>::to_float(src[label]) : NAN;
  r.old = tokens.old_logprobs[i];
  r.advantage = tokens.advantages[i];
  r.ref = tokens.ref_logprobs ? tokens.ref_logprobs[i] : 0.f;
  r.weight = tokens.weights ? tokens.weights[i] : 1.f;
  r.share = (out.token_scale ? out.token_scale[i] : 1.f) / denominator_of(tokens);
  return r;
}

__device__ __forceinline__ bool is_scored(const rl_logits& a, const rl_loss_tokens& tokens, int64_t i) {
  return (tokens.loss_mask == nullptr || tokens.loss_mask[i] != 0) && !is_ignored(a, a.labels[i]);
}

// The gradient of row i, whose statistics are `st`; thread `writer` also writes the row's results.
template <int MODE>
__device__ __forceinline__ RowGrad row_gradient(const Stats& st, const RowInputs& in, const rl_loss_spec& spec,
                                                const rl_loss_tokens& tokens, const rl_fused_out& out, int64_t i, const Scale& scale,
                                                bool writer) {
  const RowResult result = finish_row(st, scale.cap<MODE>(in.label_x) * scale.log2);
  if (writer) {
    if (out.logprobs) out.logprobs[i] = result.logprob;
    if (out.entropy) out.entropy[i] = result.entropy;
  }
  const Term term = token_term(spec, result.logprob, in.old, in.advantage, 0.f);
  const Kl kl = tokens.ref_logprobs ? kl_of(spec, result.logprob - in.ref) : Kl{0.f, 0.f};
  const float g = (term.grad * in.weight + spec.kl_coef * kl.grad) * in.share;
  return make_grad(g, -spec.entropy_coef * in.share, result.logprob, result.lse, result.entropy, scale);
}

// Statistics of the vectors a thread holds: numbers first, first + step, ... below `full` (whole) or at it (the partial one).
template <typename T, int MODE, int N>
__device__ __forceinline__ Stats held_stats(const uint4 (&v)[N], int first, int step, int full, int64_t size, const Scale& scale) {
  Stats st = empty_stats();
  constexpr int kTile = MODE & kSoftcap ? 1 : N % 5 == 0 ? 5 : N % 4 == 0 ? 4 : N % 3 == 0 ? 3 : 1;
#pragma unroll
  for (int u = 0; u < N; u += kTile) {
    uint4 tile[kTile];
#pragma unroll
    for (int w = 0; w < kTile; ++w) tile[w] = first + (u + w) * step < full ? v[u + w] : neg_inf_vec<T>();
    if (!(MODE & kSoftcap) || first + u * step < full) add_tile<T, MODE>(st, tile, scale);
  }
#pragma unroll
  for (int u = 0; u < N; ++u)
    if (first + u * step == full && full * int64_t(Element<T>::kPerVec) < size) add_tail<T, MODE>(st, v[u], full, size, scale);
  return st;
}

template <typename T, int MODE, int N, bool WHOLE>
__device__ __forceinline__ void write_held(const RowWriter<T, WHOLE>& writer, const uint4 (&v)[N], int first, int step, int stop, int size,
                                           int label, const RowGrad& g, const Scale& scale) {
  constexpr int k = Element<T>::kPerVec;
#pragma unroll
  for (int u = 0; u < N; ++u) {
    const int n = first + u * step;
    if (n >= stop) continue;
    float x[k] = {};
    if (!g.is_zero) vec_grad<T, MODE>(v[u], n * k, label, g, scale, x);
    writer.write(n * k, size, x);
  }
}

template <typename T, bool WHOLE>
__device__ __forceinline__ void write_zeros(const RowWriter<T, WHOLE>& writer, int first, int step, int stop, int size) {
  const float zero[Element<T>::kPerVec] = {};
  for (int n = first; n < stop; n += step) writer.write(n * Element<T>::kPerVec, size, zero);
}

__device__ __forceinline__ void write_unscored(const rl_fused_out& out, int64_t i) {
  if (out.logprobs) out.logprobs[i] = 0.f;
  if (out.entropy) out.entropy[i] = 0.f;
}

}  // namespace rl
