// Paged attention for decoding (PagedAttention, 2309.06180; split keys as in Flash-Decoding): one block for each new token, key head
// and run of kSplit positions. Lanes side by side hold one key; each reads 16 bytes of it, for all query heads that share it.
//
// Which positions a block takes depends on the token's own position alone: its bits do not depend on the other tokens of a call.
#include "launch.cuh"
#include "common.cuh"

namespace rl {
namespace {

constexpr int kThreads = 128;
constexpr int kSplit = 256;   // positions of one block
constexpr int kUnroll = 4;    // vectors that are under way at a time, for each lane

__device__ __forceinline__ int64_t slot_of(const rl_device_attention& a, int64_t row, int64_t position) {
  const int64_t page = a.page_shift >= 0 ? position >> a.page_shift : position / a.page_size;
  return a.block_tables[row * a.table_columns + page] * a.page_size + (position - page * a.page_size);
}

// Slots of N positions from `first` on, a multiple of N, of which those from begin to end are wanted: one look into the block table
// where pages are not smaller.
template <int N>
__device__ __forceinline__ void slots_of(const rl_device_attention& a, int64_t row, int64_t first, int64_t begin, int64_t end, int64_t (&slots)[N]) {
  const bool is_one = a.page_shift >= 0 && (1 << a.page_shift) >= N;
  const int64_t start = is_one && first < end ? slot_of(a, row, first) : 0;
#pragma unroll
  for (int u = 0; u < N; ++u) {
    const bool is_there = first + u >= begin && first + u < end;
    slots[u] = !is_there ? -1 : is_one ? start + u : slot_of(a, row, first + u);
  }
}

// A block for each token: its key and value into their page.
__global__ void __launch_bounds__(kThreads) write_kernel(const rl_device_attention a, int64_t vectors) {
  const int64_t token = blockIdx.x, slot = slot_of(a, a.rows[token], a.positions[token]);
  for (int64_t i = threadIdx.x; i < 2 * vectors; i += kThreads) {
    const bool is_value = i >= vectors;
    const int64_t at = is_value ? i - vectors : i;
    const uint4* from = static_cast<const uint4*>(is_value ? a.value : a.key);
    uint4* to = static_cast<uint4*>(is_value ? a.value_cache : a.key_cache);
    to[slot * vectors + at] = from[token * vectors + at];
  }
}

// Of the positions first..last that a token sees, those of a split.
struct Seen {
  int64_t first, last;
  __device__ Seen(const rl_device_attention& a, int64_t token) {
    last = a.positions[token];
    first = a.window > 0 && last + 1 > a.window ? last + 1 - a.window : 0;
  }
  __device__ int64_t splits() const { return (last - first) / kSplit + 1; }
};

// LANES side by side hold a key of VECS * LANES vectors at most; G query heads at a time.
template <typename T, int LANES, int VECS, int G>
__global__ void __launch_bounds__(kThreads) attention_kernel(const rl_device_attention a) {
  constexpr int kPer = Element<T>::kPerVec, kSubs = kThreads / LANES, kNumbers = VECS * kPer, kKeys = kUnroll / VECS;
  __shared__ float maxima[kSubs][G], sums[kSubs][G];
  __shared__ float totals[G][kSubs][LANES * kNumbers];
  const int split = int(blockIdx.x % a.splits);
  const int per_kv = int(a.heads / a.kv_heads), parts = (per_kv + G - 1) / G;
  const int64_t rest = blockIdx.x / a.splits, token = rest / (a.kv_heads * parts);
  const int kv = int(rest / parts % a.kv_heads), part = int(rest % parts);
  const int head = kv * per_kv + part * G, count = min(G, per_kv - part * G);
  const Seen seen(a, token);
  const int64_t begin = seen.first + int64_t(split) * kSplit, end = min(begin + kSplit, seen.last + 1);
  if (begin >= end) return;  // the whole block
  const int lane = threadIdx.x % LANES, sub = threadIdx.x / LANES, vectors = int(a.size * int64_t(sizeof(T)) / 16);
  const int64_t row = a.rows[token];
  const float scale = a.softcap > 0.f ? a.scaling : a.scaling * kLog2e;

  float query[G][kNumbers], total[G][kNumbers], largest[G], sum[G];
#pragma unroll
  for (int g = 0; g < G; ++g) {
    largest[g] = -INFINITY;
    sum[g] = 0.f;
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const int vec = v * LANES + lane;
      float x[kPer] = {};
      if (g < count && vec < vectors) unpack_vec<T>(static_cast<const uint4*>(a.query)[(token * a.heads + head + g) * vectors + vec], x);
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        query[g][v * kPer + e] = x[e] * scale;
        total[g][v * kPer + e] = 0.f;
      }
    }
  }
  for (int64_t base = begin - begin % kKeys; base < end; base += kSubs * kKeys) {  // the same for all threads: they meet in shuffles
    uint4 keys[kKeys][VECS], values[kKeys][VECS];
    int64_t slots[kKeys];
    slots_of(a, row, base + sub * kKeys, begin, end, slots);
#pragma unroll
    for (int u = 0; u < kKeys; ++u) {
      const int64_t at = (slots[u] * a.kv_heads + kv) * vectors;
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
        const int vec = v * LANES + lane;
        const bool reads = slots[u] >= 0 && vec < vectors;
        keys[u][v] = reads ? load_stream(static_cast<const uint4*>(a.key_cache) + at + vec) : make_uint4(0, 0, 0, 0);
        values[u][v] = reads ? load_stream(static_cast<const uint4*>(a.value_cache) + at + vec) : make_uint4(0, 0, 0, 0);
      }
    }
    float scores[kKeys][G];
#pragma unroll
    for (int u = 0; u < kKeys; ++u) {
#pragma unroll
      for (int g = 0; g < G; ++g) scores[u][g] = 0.f;
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
        float key[kPer];
        unpack_vec<T>(keys[u][v], key);
#pragma unroll
        for (int g = 0; g < G; ++g) {
#pragma unroll
          for (int e = 0; e < kPer; ++e) scores[u][g] = fmaf(query[g][v * kPer + e], key[e], scores[u][g]);
        }
      }
#pragma unroll
      for (int g = 0; g < G; ++g) {
#pragma unroll
        for (int step = LANES / 2; step > 0; step >>= 1) scores[u][g] += __shfl_xor_sync(kFull, scores[u][g], step);
        if (a.softcap > 0.f) scores[u][g] = tanhf(scores[u][g] / a.softcap) * a.softcap * kLog2e;
        if (slots[u] < 0) scores[u][g] = -INFINITY;
      }
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float top = largest[g];
#pragma unroll
      for (int u = 0; u < kKeys; ++u) top = max_nan(top, scores[u][g]);
      if (top == -INFINITY) top = 0.f;  // nothing yet: the sums are 0, and so are the weights below
      const float kept = exp2_fast(largest[g] - top);
      largest[g] = top;
      sum[g] *= kept;
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) total[g][i] *= kept;
#pragma unroll
      for (int u = 0; u < kKeys; ++u) {
        scores[u][g] = exp2_fast(scores[u][g] - top);
        sum[g] += scores[u][g];
      }
    }
#pragma unroll
    for (int u = 0; u < kKeys; ++u) {
#pragma unroll
      for (int v = 0; v < VECS; ++v) {
        float value[kPer];
        unpack_vec<T>(values[u][v], value);
#pragma unroll
        for (int g = 0; g < G; ++g) {
#pragma unroll
          for (int e = 0; e < kPer; ++e) total[g][v * kPer + e] = fmaf(scores[u][g], value[e], total[g][v * kPer + e]);
        }
      }
    }
  }
#pragma unroll
  for (int g = 0; g < G; ++g) {
    if (lane == 0) {
      maxima[sub][g] = sum[g] == 0.f ? -INFINITY : largest[g];
      sums[sub][g] = sum[g];
    }
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
#pragma unroll
      for (int e = 0; e < kPer; ++e) totals[g][sub][(v * LANES + lane) * kPer + e] = total[g][v * kPer + e];
    }
  }
  __syncthreads();
  const bool is_alone = seen.splits() == 1;
  for (int i = threadIdx.x; i < count * int(a.size); i += kThreads) {
    const int g = i / int(a.size), d = i % int(a.size);
    float top = -INFINITY, all = 0.f, found = 0.f;
    for (int s = 0; s < kSubs; ++s) top = max_nan(top, maxima[s][g]);
    const float sink = is_alone && a.sinks != nullptr ? a.sinks[head + g] * kLog2e : -INFINITY;
    top = max_nan(top, sink);
    for (int s = 0; s < kSubs; ++s) {
      const float weight = maxima[s][g] == -INFINITY ? 0.f : exp2_fast(maxima[s][g] - top);
      all = fmaf(sums[s][g], weight, all);
      found = fmaf(totals[g][s][d], weight, found);
    }
    const int64_t at = token * a.heads + head + g;
    if (is_alone) {
      static_cast<T*>(a.out)[at * a.size + d] = Element<T>::from_float(found / (all + exp2_fast(sink - top)));
    } else {
      a.partial[(at * a.splits + split) * a.size + d] = found;
      if (d == 0) {
        a.stats[(at * a.splits + split) * 2] = top;
        a.stats[(at * a.splits + split) * 2 + 1] = all;
      }
    }
  }
}

// A block for each token and head whose positions were split.
template <typename T>
__global__ void __launch_bounds__(kThreads) combine_kernel(const rl_device_attention a) {
  const int64_t at = blockIdx.x, token = at / a.heads, splits = Seen(a, token).splits();
  if (splits == 1) return;
  const float* stats = a.stats + at * a.splits * 2;
  const float sink = a.sinks != nullptr ? a.sinks[at % a.heads] * kLog2e : -INFINITY;
  float top = sink;
  for (int64_t s = 0; s < splits; ++s) top = max_nan(top, stats[s * 2]);
  float all = exp2_fast(sink - top);
  for (int64_t s = 0; s < splits; ++s) all = fmaf(stats[s * 2 + 1], exp2_fast(stats[s * 2] - top), all);
  for (int64_t d = threadIdx.x; d < a.size; d += kThreads) {
    float found = 0.f;
    for (int64_t s = 0; s < splits; ++s) found = fmaf(a.partial[(at * a.splits + s) * a.size + d], exp2_fast(stats[s * 2] - top), found);
    static_cast<T*>(a.out)[at * a.size + d] = Element<T>::from_float(found / all);
  }
}

template <typename T, int LANES, int VECS, int G>
int attend(const rl_device_attention& a, void* stream) {
  const int64_t parts = (a.heads / a.kv_heads + G - 1) / G;
  return launch(attention_kernel<T, LANES, VECS, G>, a.tokens * a.kv_heads * parts * a.splits, kThreads, stream, a);
}

template <typename T, int LANES, int VECS>
int attend_heads(const rl_device_attention& a, void* stream) {
  const int64_t per_kv = a.heads / a.kv_heads;
  if (per_kv == 1) return attend<T, LANES, VECS, 1>(a, stream);
  if (per_kv == 2) return attend<T, LANES, VECS, 2>(a, stream);
  if constexpr (VECS == 1) {
    if (per_kv > 4) return attend<T, LANES, VECS, 8>(a, stream);
  }
  return attend<T, LANES, VECS, 4>(a, stream);  // eight heads of two vectors would be more than a block's shared memory
}

}  // namespace
}  // namespace rl

extern "C" int64_t rl_cuda_paged_splits(int64_t positions) { return rl::ceil_div(positions, rl::kSplit); }

extern "C" int rl_cuda_paged_attention(const rl_device_attention* attention, void* stream) {
  using namespace rl;
  const rl_device_attention& a = *attention;
  if (a.tokens == 0) return 0;
  const int64_t bytes = a.size * (a.dtype == RL_F32 ? 4 : 2);
  if (bytes % 16 || bytes > 1024 || a.heads % a.kv_heads) return RL_CUDA_NOT_SUPPORTED;
  if (a.key != nullptr) {
    if (const int status = launch(write_kernel, a.tokens, kThreads, stream, a, a.kv_heads * bytes / 16)) return status;
  }
  return by_dtype(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int status = bytes <= 128   ? attend_heads<T, 8, 1>(a, stream)
                       : bytes <= 256 && a.heads / a.kv_heads > 2 ? attend_heads<T, 16, 1>(a, stream)
                       : bytes <= 256 ? attend_heads<T, 8, 2>(a, stream)
                       : bytes <= 512 ? attend_heads<T, 32, 1>(a, stream)
                                      : attend_heads<T, 32, 2>(a, stream);
    if (status || a.splits == 1) return status;
    return launch(combine_kernel<T>, a.tokens * a.heads, kThreads, stream, a);
  });
}
