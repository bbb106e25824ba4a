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

RL_INLINE float add_lanes(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
#endif
}

constexpr int64_t kAhead = 8;

RL_INLINE void prefetch(const void* address, int64_t nbytes) {
  for (int64_t i = 0; i < nbytes; i += 64) __builtin_prefetch((const char*)address + i);
}

template <class T>
RL_INLINE float dot(const float* q, const typename T::storage* k, int64_t size) {
  vf sum{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sum = fma(load(q + i), T::get(k + i), sum);
  float total = add_lanes(sum);
  for (; i < size; ++i) total += q[i] * T::get_one(k + i);
  return total;
}

// Scores become weights that sum to 1 (less what a sink takes). Units of log 2 from the start.
RL_INLINE void softmax_in_place(float* scores, int64_t size, float softcap, const float* sink) {
  int64_t i;
  if (softcap > 0) {
    const float scale = 1.0f / (softcap * kLog2e);
    for (i = 0; i + kLanes <= size; i += kLanes)
      store(scores + i, tanhv(load(scores + i) * splat(scale)) * splat(softcap * kLog2e));
    for (; i < size; ++i) scores[i] = tanhv(splat(scores[i] * scale))[0] * softcap * kLog2e;
  }
  vf tops = splat(sink ? *sink * kLog2e : kFloor);
  for (i = 0; i + kLanes <= size; i += kLanes) tops = max_keeping_nan(tops, load(scores + i));
  float top = max_lane(tops);
  for (; i < size; ++i) top = scores[i] > top ? scores[i] : top;
  vf sums{};
  for (i = 0; i + kLanes <= size; i += kLanes) {
    const vf weight = exp2v(load(scores + i) - splat(top));
    store(scores + i, weight);
    sums = sums + weight;
  }
  float sum = add_lanes(sums);
  for (; i < size; ++i) sum += scores[i] = exp2v(splat(scores[i] - top))[0];
  if (sink) sum += exp2v(splat(*sink * kLog2e - top))[0];
  const float inverse = 1.0f / sum;
  for (i = 0; i < size; ++i) scores[i] *= inverse;
}

// Calls body(first position, count, slot of the first) for each run of positions [first, end) that lies in one page.
template <class Body>
RL_INLINE void each_run(const int64_t* pages, int64_t page_size, int64_t first, int64_t end, const Body& body) {
  for (int64_t p = first; p < end;) {
    const int64_t offset = p % page_size, left = page_size - offset;
    const int64_t count = left < end - p ? left : end - p;
    body(p, count, pages[p / page_size] * page_size + offset);
    p += count;
  }
}

// out[g] += sum over positions of weights[g][p] * value[p], for kGroup query heads at once.
template <class T, int kGroup>
RL_INLINE void weigh_values(const rl_paged_attention* in, const int64_t* pages, int64_t head, int64_t first, int64_t end,
                            const float* weights, typename T::storage* out) {
  typedef typename T::storage S;
  const S* cache = (const S*)in->value_cache + head * in->value_size;
  const int64_t stride = in->kv_heads * in->value_size, span = end - first;
  int64_t i = 0;
  for (; i + kLanes <= in->value_size; i += kLanes) {
    vf sums[kGroup] = {};
    each_run(pages, in->page_size, first, end, [&](int64_t p, int64_t count, int64_t slot) {
      const S* value = cache + slot * stride + i;
      const float* weight = weights + (p - first);
      for (int64_t j = 0; j < count; ++j, value += stride) {
        const vf v = T::get(value);
        for (int g = 0; g < kGroup; ++g) sums[g] = fma(splat(weight[g * span + j]), v, sums[g]);
      }
    });
    for (int g = 0; g < kGroup; ++g) T::put(out + g * in->value_size + i, sums[g]);
  }
  for (; i < in->value_size; ++i) {
    float sums[kGroup] = {};
    each_run(pages, in->page_size, first, end, [&](int64_t p, int64_t count, int64_t slot) {
      for (int64_t j = 0; j < count; ++j)
        for (int g = 0; g < kGroup; ++g)
          sums[g] += weights[g * span + (p - first) + j] * T::get_one(cache + (slot + j) * stride + i);
    });
    for (int g = 0; g < kGroup; ++g) T::put_one(out + g * in->value_size + i, sums[g]);
  }
}

template <class T>
RL_INLINE void paged_token_of(const rl_paged_attention* in, int64_t token, float* scratch) {
  typedef typename T::storage S;
  const int64_t end = in->positions[token] + 1;
  const int64_t first = in->window > 0 && end > in->window ? end - in->window : 0, span = end - first;
  const int64_t* pages = in->block_tables + in->rows[token] * in->table_stride;
  const int64_t group = in->heads / in->kv_heads, key_stride = in->kv_heads * in->key_size;
  const int64_t value_stride = in->kv_heads * in->value_size;
  float *query = scratch, *weights = scratch + group * in->key_size;
  for (int64_t head = 0; head < in->kv_heads; ++head) {
    const S* q = (const S*)in->query + token * in->query_strides[0] + head * group * in->query_strides[1];
    for (int64_t g = 0; g < group; ++g)
      for (int64_t i = 0; i < in->key_size; ++i)
        query[g * in->key_size + i] = T::get_one(q + g * in->query_strides[1] + i) * (in->scaling * kLog2e);
    const S* cache = (const S*)in->key_cache + head * in->key_size;
    const S* values = (const S*)in->value_cache + head * in->value_size;
    each_run(pages, in->page_size, first, end, [&](int64_t p, int64_t count, int64_t slot) {
      for (int64_t j = 0; j < count; ++j) {
        // The cache is larger than the processor's: ask for the next keys, and for the values that follow.
        prefetch(cache + (slot + j + kAhead) * key_stride, in->key_size * sizeof(S));
        prefetch(values + (slot + j) * value_stride, in->value_size * sizeof(S));
        for (int64_t g = 0; g < group; ++g)
          weights[g * span + (p - first) + j] = dot<T>(query + g * in->key_size, cache + (slot + j) * key_stride, in->key_size);
      }
    });
    for (int64_t g = 0; g < group; ++g)
      softmax_in_place(weights + g * span, span, in->softcap, in->sinks ? in->sinks + head * group + g : nullptr);
    S* out = (S*)in->out + (token * in->heads + head * group) * in->value_size;
    int64_t g = 0;
    for (; g + 4 <= group; g += 4)
      weigh_values<T, 4>(in, pages, head, first, end, weights + g * span, out + g * in->value_size);
    for (; g + 2 <= group; g += 2)
      weigh_values<T, 2>(in, pages, head, first, end, weights + g * span, out + g * in->value_size);
    for (; g < group; ++g) weigh_values<T, 1>(in, pages, head, first, end, weights + g * span, out + g * in->value_size);
  }
}

}  // namespace

void RL_PAGED_TOKEN(const rl_paged_attention* in, int64_t token, float* scratch) {
  switch (in->dtype) {
    case RL_BF16: return paged_token_of<Bf16>(in, token, scratch);
    case RL_F16: return paged_token_of<F16>(in, token, scratch);
    default: return paged_token_of<F32>(in, token, scratch);
  }
}

}  // namespace rl
