// Attention of one token over the pages of its sequence. Each attention_*.cpp defines RL_PAGED_TOKEN and includes this file;
// the compile options of that file choose the instructions. Nothing here may come from a std template: see level.h.
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <stdint.h>

#include "cpu/attention.h"

namespace rl {
namespace {
#include "cpu/vec.h"
#include "cpu/level_tanh.h"

RL_INLINE float top_lane(vf x) {  // of lanes with a NaN: any
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  return max_lane(x);
#endif
}

// a0 b0 a1 b1 ... of the first halves and of the second, added: half as many sums of each, side by side.
RL_INLINE vf add_halves(vf a, vf b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23) +
         __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11) + __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// Products of a query with kCount keys, keys[0] + at, keys[step] + at, ...: each key's sum stays apart until all are folded together.
template <class T, int kCount = kLanes>
RL_INLINE vf dots(const float* q, const typename T::storage* const* keys, int step, int64_t at, int64_t size) {
  if constexpr (kCount > 4) {
    return add_halves(dots<T, kCount / 2>(q, keys, 2 * step, at, size), dots<T, kCount / 2>(q, keys + step, 2 * step, at, size));
  } else {
    const typename T::storage *k0 = keys[0] + at, *k1 = keys[step] + at, *k2 = keys[2 * step] + at, *k3 = keys[3 * step] + at;
    vf sum0{}, sum1{}, sum2{}, sum3{};
    for (int64_t i = 0; i + kLanes <= size; i += kLanes) {
      const vf x = load(q + i);
      sum0 = fma(x, T::get(k0 + i), sum0), sum1 = fma(x, T::get(k1 + i), sum1);
      sum2 = fma(x, T::get(k2 + i), sum2), sum3 = fma(x, T::get(k3 + i), sum3);
    }
    return add_halves(add_halves(sum0, sum2), add_halves(sum1, sum3));
  }
}

// Scores of one query with kLanes keys, which begin at `at` of their positions.
template <class T>
RL_INLINE vf scores_of(const float* q, const typename T::storage* const* keys, int64_t at, int64_t size) {
  const vf scores = dots<T>(q, keys, 1, at, size);
  int64_t i = size / kLanes * kLanes;
  if (i == size) return scores;
  float rest[kLanes] = {};
  for (; i < size; ++i)
    for (int j = 0; j < kLanes; ++j) rest[j] += q[i] * T::get_one(keys[j] + at + i);
  return scores + load(rest);
}

// Scores become weights that sum to 1 (less what a sink takes), those from `size` to `padded` 0. Units of log 2 from the start.
RL_INLINE void softmax_in_place(float* scores, int64_t size, int64_t padded, float softcap, const float* sink) {
  if (softcap > 0) {
    const vf scale = splat(1.0f / (softcap * kLog2e)), cap = splat(softcap * kLog2e);
    for (int64_t i = 0; i < padded; i += kLanes) store(scores + i, tanhv(load(scores + i) * scale) * cap);
  }
  for (int64_t i = size; i < padded; ++i) scores[i] = 2 * kFloor;
  vf tops = splat(sink ? *sink * kLog2e : kFloor);
  for (int64_t i = 0; i < padded; i += kLanes) tops = max_keeping_nan(tops, load(scores + i));
  const float top = top_lane(tops);
  vf sums{};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const vf weight = exp2v(load(scores + i) - splat(top));
    store(scores + i, weight);
    sums = sums + weight;
  }
  float sum = add_lanes(sums);
  if (sink) sum += exp2v(splat(*sink * kLog2e - top))[0];
  const vf inverse = splat(1.0f / sum);
  for (int64_t i = 0; i < padded; i += kLanes) store(scores + i, load(scores + i) * inverse);
}

// Numbers [i, i + kWidth * kLanes) of the outputs of kGroup query heads: sums over positions of weights[g][p] * value[p].
template <class T, int kGroup, int kWidth>
RL_INLINE void weigh_lanes(const rl_paged_attention* in, const typename T::storage* values, const int64_t* slots, int64_t span,
                           const float* weights, int64_t padded, typename T::storage* out, int64_t i) {
  const int64_t stride = in->kv_heads * in->value_size;
  vf sums[kGroup][kWidth] = {};
  for (int64_t p = 0; p < span; ++p)
    for (int w = 0; w < kWidth; ++w) {
      const vf value = T::get(values + slots[p] * stride + i + w * kLanes);
      for (int g = 0; g < kGroup; ++g) sums[g][w] = fma(splat(weights[g * padded + p]), value, sums[g][w]);
    }
  for (int g = 0; g < kGroup; ++g)
    for (int w = 0; w < kWidth; ++w) T::put(out + g * in->value_size + i + w * kLanes, sums[g][w]);
}

template <class T, int kGroup>
RL_INLINE void weigh_values(const rl_paged_attention* in, const typename T::storage* values, const int64_t* slots, int64_t span,
                            const float* weights, int64_t padded, typename T::storage* out) {
  constexpr int kWidth = kGroup == 4 ? 2 : 4;  // as many sums as hide the latency of an addition and fit in registers
  int64_t i = 0;
  for (; i + kWidth * kLanes <= in->value_size; i += kWidth * kLanes)
    weigh_lanes<T, kGroup, kWidth>(in, values, slots, span, weights, padded, out, i);
  for (; i + 2 * kLanes <= in->value_size; i += 2 * kLanes) weigh_lanes<T, kGroup, 2>(in, values, slots, span, weights, padded, out, i);
  for (; i + kLanes <= in->value_size; i += kLanes) weigh_lanes<T, kGroup, 1>(in, values, slots, span, weights, padded, out, i);
  for (; i < in->value_size; ++i) {
    float sums[kGroup] = {};
    for (int64_t p = 0; p < span; ++p)
      for (int g = 0; g < kGroup; ++g)
        sums[g] += weights[g * padded + p] * T::get_one(values + slots[p] * in->kv_heads * in->value_size + i);
    for (int g = 0; g < kGroup; ++g) T::put_one(out + g * in->value_size + i, sums[g]);
  }
}

template <class T>
RL_INLINE void paged_token_of(const rl_paged_attention* in, int64_t token, float* scratch, int64_t* slots) {
  typedef typename T::storage S;
  const int64_t end = in->positions[token] + 1;
  const int64_t first = in->window > 0 && end > in->window ? end - in->window : 0, span = end - first;
  const int64_t padded = (span + kLanes - 1) / kLanes * kLanes;
  const int64_t* pages = in->block_tables + in->rows[token] * in->table_stride;
  const int64_t group = in->heads / in->kv_heads, key_stride = in->kv_heads * in->key_size;
  for (int64_t p = first; p < end;) {
    const int64_t page = p / in->page_size, page_end = (page + 1) * in->page_size, shift = (pages[page] - page) * in->page_size;
    for (; p < page_end && p < end; ++p) slots[p - first] = p + shift;
  }
  for (int64_t p = span; p < padded; ++p) slots[p] = slots[span - 1];  // keys beyond the last are not read
  float *query = scratch, *weights = scratch + in->heads * in->key_size;
  for (int64_t h = 0; h < in->heads; ++h) {
    const S* q = (const S*)in->query + token * in->query_strides[0] + h * in->query_strides[1];
    for (int64_t i = 0; i < in->key_size; ++i) query[h * in->key_size + i] = T::get_one(q + i) * (in->scaling * kLog2e);
  }
  for (int64_t p = 0; p < padded; p += kLanes) {
    const S* keys[kLanes];
    for (int j = 0; j < kLanes; ++j) keys[j] = (const S*)in->key_cache + slots[p + j] * key_stride;
    for (int64_t h = 0; h < in->heads; ++h)
      store(weights + h * padded + p, scores_of<T>(query + h * in->key_size, keys, h / group * in->key_size, in->key_size));
  }
  for (int64_t h = 0; h < in->heads; ++h) softmax_in_place(weights + h * padded, span, padded, in->softcap, in->sinks ? in->sinks + h : nullptr);
  for (int64_t head = 0; head < in->kv_heads; ++head) {
    const S* values = (const S*)in->value_cache + head * in->value_size;
    const float* its = weights + head * group * padded;
    S* out = (S*)in->out + token * in->out_stride + head * group * in->value_size;
    int64_t g = 0;
    for (; g + 4 <= group; g += 4) weigh_values<T, 4>(in, values, slots, span, its + g * padded, padded, out + g * in->value_size);
    for (; g + 2 <= group; g += 2) weigh_values<T, 2>(in, values, slots, span, its + g * padded, padded, out + g * in->value_size);
    for (; g < group; ++g) weigh_values<T, 1>(in, values, slots, span, its + g * padded, padded, out + g * in->value_size);
  }
}

}  // namespace

void RL_PAGED_TOKEN(const rl_paged_attention* in, int64_t token, float* scratch, int64_t* slots) {
  switch (in->dtype) {
    case RL_BF16: return paged_token_of<Bf16>(in, token, scratch, slots);
    case RL_F16: return paged_token_of<F16>(in, token, scratch, slots);
    default: return paged_token_of<F32>(in, token, scratch, slots);
  }
}

}  // namespace rl
