// The bit-exact delta of FRAMES.md: one block per chunk of 65536 elements. Encoding first
// notes which elements changed, a bit each, and counts; the counts of all chunks then say where each one writes.
#include "common.cuh"
#include "launch.cuh"

namespace rl {
namespace {

constexpr int kChunk = 65536;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kWords = kChunk / 32;            // of the bit mask of changed elements
constexpr int kPerThread = kWords / kThreads;  // mask words of one thread

// Exclusive scans over the block, in thread order; ends with a barrier. `scratch` has kWarps entries.
template <typename T, typename Op>
__device__ __forceinline__ T exclusive_scan(T x, T identity, T* scratch, T& total, const Op& op) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  T inclusive = x;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const T left = __shfl_up_sync(kFull, inclusive, step);
    if (lane >= step) inclusive = op(left, inclusive);
  }
  if (lane == 31) scratch[warp] = inclusive;
  __syncthreads();
  T before = identity;
  total = identity;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before = op(before, scratch[w]);
    total = op(total, scratch[w]);
  }
  const T left = __shfl_up_sync(kFull, inclusive, 1);
  __syncthreads();
  return lane == 0 ? before : op(before, left);
}

struct Sum {
  __device__ int operator()(int a, int b) const { return a + b; }
};
struct Max {
  __device__ int operator()(int a, int b) const { return a > b ? a : b; }
};

// Calls f(position) for the changed elements of this thread's share, in order.
template <typename F>
__device__ __forceinline__ void for_changed(const uint32_t (&mask)[kPerThread], const F& f) {
#pragma unroll
  for (int w = 0; w < kPerThread; ++w) {
    for (uint32_t bits = mask[w]; bits; bits &= bits - 1) f((int(threadIdx.x) * kPerThread + w) * 32 + __ffs(bits) - 1);
  }
}

// A 16-byte vector's elements that differ, one bit each.
template <typename Word>
__device__ __forceinline__ uint32_t differing(const uint4& a, const uint4& b) {
  const uint32_t x[4] = {a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w};
  uint32_t bits = 0;
  if constexpr (sizeof(Word) == 8) {
    bits = uint32_t((x[0] | x[1]) != 0) | uint32_t((x[2] | x[3]) != 0) << 1;
  } else if constexpr (sizeof(Word) == 4) {
#pragma unroll
    for (int w = 0; w < 4; ++w) bits |= uint32_t(x[w] != 0) << w;
  } else {
    constexpr int kPer = 4 / sizeof(Word), kBits = 8 * sizeof(Word);
#pragma unroll
    for (int w = 0; w < 4; ++w)
#pragma unroll
      for (int e = 0; e < kPer; ++e) bits |= uint32_t(((x[w] >> (e * kBits)) & ((1u << kBits) - 1)) != 0) << (w * kPer + e);
  }
  return bits;
}

// The chunk's bit mask of changed elements, into shared memory. Whole chunks at aligned addresses go by vectors.
template <typename Word>
__device__ __forceinline__ void compare_chunk(const Word* fresh, const Word* base, int64_t origin, int64_t size, uint32_t* changed) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  constexpr int kPer = 16 / sizeof(Word), kLanes = 32 / kPer;  // elements of a vector; lanes that fill a mask word
  const bool vectors = ((reinterpret_cast<uintptr_t>(fresh) | reinterpret_cast<uintptr_t>(base)) & 15) == 0 && origin + kChunk <= size;
  if (vectors) {
    constexpr int kVecs = kChunk / kPer, kAhead = 4;
    for (int first = threadIdx.x; first < kVecs; first += kThreads * kAhead) {
      uint4 a[kAhead], b[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        a[u] = load_stream(fresh + origin + int64_t(first + u * kThreads) * kPer);
        b[u] = load_stream(base + origin + int64_t(first + u * kThreads) * kPer);
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        uint32_t word = differing<Word>(a[u], b[u]) << (kPer * (lane % kLanes));
#pragma unroll
        for (int step = 1; step < kLanes; step <<= 1) word |= __shfl_xor_sync(kFull, word, step);
        if (lane % kLanes == 0) changed[(first + u * kThreads) / kLanes] = word;
      }
    }
    return;
  }
  for (int w = warp; w < kWords; w += kWarps) {
    const int64_t i = origin + w * 32 + lane;
    const uint32_t votes = __ballot_sync(kFull, i < size && fresh[i] != base[i]);
    if (lane == 0) changed[w] = votes;
  }
}

// Without WRITE: fills `masks` (kWords words per chunk) and `table`. With WRITE: `starts` [chunks, 2] says where the chunk's values
// and gap bytes begin.
template <typename Word, bool WRITE>
__global__ void __launch_bounds__(kThreads) encode_kernel(const Word* fresh, const Word* base, int64_t size, uint32_t* masks,
                                                          int32_t* table, const int64_t* starts, uint8_t* gaps, Word* values) {
  __shared__ uint32_t changed[kWords];
  __shared__ int scratch[kWarps];
  const int64_t origin = int64_t(blockIdx.x) * kChunk;
  uint4* mine = reinterpret_cast<uint4*>(masks + int64_t(blockIdx.x) * kWords) + threadIdx.x;
  uint32_t mask[kPerThread];
  static_assert(kPerThread == 4, "a thread's mask words are one vector");
  if constexpr (WRITE) {
    if (table[blockIdx.x * 2] == 0) return;
    const uint4 v = *mine;
    mask[0] = v.x, mask[1] = v.y, mask[2] = v.z, mask[3] = v.w;
  } else {
    compare_chunk(fresh, base, origin, size, changed);
    __syncthreads();
    const uint4 v = reinterpret_cast<const uint4*>(changed)[threadIdx.x];
    mask[0] = v.x, mask[1] = v.y, mask[2] = v.z, mask[3] = v.w;
    *mine = v;
  }
  int count = 0, last = -1;
#pragma unroll
  for (int w = 0; w < kPerThread; ++w) {
    count += __popc(mask[w]);
    if (mask[w]) last = (int(threadIdx.x) * kPerThread + w) * 32 + 31 - __clz(mask[w]);
  }
  int total = 0;
  const int previous = exclusive_scan(last, -1, scratch, total, Max{});
  int at = previous, bytes = 0;
  for_changed(mask, [&](int position) {
    bytes += (position - at - 1) / 255 + 1;
    at = position;
  });
  int num_changed = 0, num_bytes = 0;
  const int first_value = exclusive_scan(count, 0, scratch, num_changed, Sum{});
  const int first_byte = exclusive_scan(bytes, 0, scratch, num_bytes, Sum{});
  if constexpr (WRITE) {
    Word* value = values + starts[blockIdx.x * 2] + first_value;
    uint8_t* gap = gaps + starts[blockIdx.x * 2 + 1] + first_byte;
    at = previous;
    for_changed(mask, [&](int position) {
      int skip = position - at - 1;
      for (; skip >= 255; skip -= 255) *gap++ = 255;
      *gap++ = uint8_t(skip);
      *value++ = fresh[origin + position];
      at = position;
    });
  } else if (threadIdx.x == 0) {
    table[blockIdx.x * 2] = num_changed;
    table[blockIdx.x * 2 + 1] = num_bytes;
  }
}

// Without WRITE: sets *bad where the gaps leave the chunk, or do not name as many elements as the table says.
template <typename Word, bool WRITE>
__global__ void __launch_bounds__(kThreads) apply_kernel(Word* target, int64_t size, const int32_t* table, const int64_t* starts,
                                                         const uint8_t* gaps, const Word* values, int32_t* bad) {
  __shared__ int scratch[kWarps];
  const int64_t origin = int64_t(blockIdx.x) * kChunk;
  const int num_bytes = table[blockIdx.x * 2 + 1], num_changed = table[blockIdx.x * 2];
  const uint8_t* mine = gaps + starts[blockIdx.x * 2 + 1];
  const Word* fresh = values + starts[blockIdx.x * 2];
  constexpr int kBytes = 8;  // of one thread at a time
  int done = 0;
  int64_t position = 0;  // of the next element not yet passed
  for (int tile = 0; tile < num_bytes; tile += kThreads * kBytes) {
    const int first = tile + int(threadIdx.x) * kBytes;
    int advance = 0, count = 0;
    uint8_t b[kBytes];
#pragma unroll
    for (int j = 0; j < kBytes; ++j) {
      b[j] = first + j < num_bytes ? mine[first + j] : 0;
      if (first + j >= num_bytes) continue;
      advance += b[j] == 255 ? 255 : b[j] + 1;
      count += b[j] != 255;
    }
    int all_advance = 0, all_count = 0;
    int64_t p = position + exclusive_scan(advance, 0, scratch, all_advance, Sum{});
    int v = done + exclusive_scan(count, 0, scratch, all_count, Sum{});
#pragma unroll
    for (int j = 0; j < kBytes; ++j) {
      if (first + j >= num_bytes) continue;
      if (b[j] != 255) {
        const int64_t element = p + b[j];
        if constexpr (WRITE) {
          if (element < kChunk && origin + element < size && v < num_changed) target[origin + element] = fresh[v];
        } else {
          if (element >= kChunk || origin + element >= size) *bad = 1;
        }
        ++v;
      }
      p += b[j] == 255 ? 255 : b[j] + 1;
    }
    position += all_advance;
    done += all_count;
  }
  if (!WRITE && threadIdx.x == 0 && done != num_changed) *bad = 1;
}

template <typename F>
int by_item(int64_t item_bytes, F&& f) {
  switch (item_bytes) {
    case 1: return f(uint8_t{});
    case 2: return f(uint16_t{});
    case 4: return f(uint32_t{});
    case 8: return f((unsigned long long)0);
    default: return int(cudaErrorInvalidValue);
  }
}

}  // namespace
}  // namespace rl

extern "C" int rl_cuda_delta_encode(const void* fresh, const void* base, int64_t size, int64_t item_bytes, uint32_t* masks,
                                    int32_t* table, const int64_t* starts, uint8_t* gaps, void* values, void* stream) {
  using namespace rl;
  if (size == 0) return 0;
  return by_item(item_bytes, [&](auto word) {
    using Word = decltype(word);
    auto* kernel = starts ? encode_kernel<Word, true> : encode_kernel<Word, false>;
    return launch(kernel, ceil_div(size, kChunk), kThreads, stream, static_cast<const Word*>(fresh), static_cast<const Word*>(base), size,
                  masks, table, starts, gaps, static_cast<Word*>(values));
  });
}

extern "C" int rl_cuda_delta_apply(void* target, int64_t size, int64_t item_bytes, const int32_t* table, const int64_t* starts,
                                   const uint8_t* gaps, const void* values, int32_t* bad, void* stream) {
  using namespace rl;
  if (size == 0) return 0;
  return by_item(item_bytes, [&](auto word) {
    using Word = decltype(word);
    auto* kernel = bad ? apply_kernel<Word, false> : apply_kernel<Word, true>;
    return launch(kernel, ceil_div(size, kChunk), kThreads, stream, static_cast<Word*>(target), size, table, starts, gaps,
                  static_cast<const Word*>(values), bad);
  });
}
