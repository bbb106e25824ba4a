// What the kernels share: 16-byte vector access for rows of any alignment, conversions, softmax statistics and reductions.
#pragma once
#include <stdint.h>

#include "device.cuh"

namespace rl {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr int kWarp = 32;
constexpr unsigned kFull = 0xffffffffu;

template <typename T>
struct Element;

template <>
struct Element<float> {
  static constexpr int kPerVec = 4;
  __device__ static float to_float(float x) { return x; }
  __device__ static float from_float(float x) { return x; }
  // The elements of one 32-bit word, as floats.
  __device__ static void unpack(uint32_t w, float* out) { out[0] = __uint_as_float(w); }
  __device__ static uint32_t pack(const float* in) { return __float_as_uint(in[0]); }
};

template <>
struct Element<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  static constexpr int kPerVec = 8;
  __device__ static float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
  __device__ static __nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }
  __device__ static void unpack(uint32_t w, float* out) {
    out[0] = __uint_as_float(w << 16);
    out[1] = __uint_as_float(w & 0xffff0000u);
  }
  __device__ static uint32_t pack(const float* in) {
    __nv_bfloat162 p = __floats2bfloat162_rn(in[0], in[1]);
    return *reinterpret_cast<uint32_t*>(&p);
  }
};

template <>
struct Element<__half> {
  using Pair = __half2;
  static constexpr int kPerVec = 8;
  __device__ static float to_float(__half x) { return __half2float(x); }
  __device__ static __half from_float(float x) { return __float2half_rn(x); }
  __device__ static void unpack(uint32_t w, float* out) {
    float2 f = __half22float2(*reinterpret_cast<__half2*>(&w));
    out[0] = f.x;
    out[1] = f.y;
  }
  __device__ static uint32_t pack(const float* in) {
    __half2 p = __floats2half2_rn(in[0], in[1]);
    return *reinterpret_cast<uint32_t*>(&p);
  }
};

template <typename T>
__device__ __forceinline__ void unpack_vec(const uint4& v, float (&out)[Element<T>::kPerVec]) {
  constexpr int k = Element<T>::kPerVec / 4;
  Element<T>::unpack(v.x, out);
  Element<T>::unpack(v.y, out + k);
  Element<T>::unpack(v.z, out + 2 * k);
  Element<T>::unpack(v.w, out + 3 * k);
}

template <typename T>
__device__ __forceinline__ uint4 pack_vec(const float (&in)[Element<T>::kPerVec]) {
  constexpr int k = Element<T>::kPerVec / 4;
  return make_uint4(Element<T>::pack(in), Element<T>::pack(in + k), Element<T>::pack(in + 2 * k),
                    Element<T>::pack(in + 3 * k));
}

__device__ __forceinline__ uint4 load_plain(const void* p) { return *reinterpret_cast<const uint4*>(p); }

__device__ __forceinline__ void store_stream(void* p, const uint4& v) { __stcs(reinterpret_cast<uint4*>(p), v); }

// What a vector of T became, as D: 16 bytes, or 8 where four floats are stored as 16-bit numbers.
template <typename T, typename D>
__device__ __forceinline__ void store_vec(D* to, const float (&x)[Element<T>::kPerVec]) {
  if constexpr (sizeof(T) == sizeof(D)) {
    store_stream(to, pack_vec<D>(x));
  } else {
    __stcs(reinterpret_cast<uint2*>(to), make_uint2(Element<D>::pack(x), Element<D>::pack(x + 2)));
  }
}

// The 16 bytes that start `shift` bytes into the 32 bytes (lo, hi). `shift` is the same for a whole row.
__device__ __forceinline__ uint4 funnel(const uint4& lo, const uint4& hi, unsigned shift) {
  uint32_t w[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
  if (shift & 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
  }
  if (shift & 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = w[i + 1];
  }
  const unsigned bits = (shift & 3) * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = __funnelshift_r(w[i], w[i + 1], bits);
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// The 16-byte block at `p`, of which only `size` bytes may be read; the rest is 0.
__device__ __forceinline__ uint4 load_block(const char* p, int64_t size) {
  if (size >= 16) return load_plain(p);
  uint64_t lo = 0, hi = 0;
#pragma unroll 1
  for (int j = 0; j < int(size); ++j) {
    const uint64_t byte = static_cast<unsigned char>(p[j]);
    if (j < 8) {
      lo |= byte << (8 * j);
    } else {
      hi |= byte << (8 * (j - 8));
    }
  }
  return make_uint4(uint32_t(lo), uint32_t(lo >> 32), uint32_t(hi), uint32_t(hi >> 32));
}

// Bytes at any address, read in vectors counted from the first byte, so that which thread reads which vector does not depend on
// the alignment. Nothing is read behind the last byte; at the front, at most what shares its 16-byte block.
struct VecReader {
  const char* base;   // 16-byte aligned address at or before the first byte
  unsigned shift;     // bytes from `base` to the first byte
  int64_t end_bytes;  // from `base` to one past the last byte

  __device__ VecReader(const void* data, int64_t nbytes) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(data);
    shift = unsigned(address & 15);
    base = reinterpret_cast<const char*>(address - shift);
    end_bytes = int64_t(shift) + nbytes;
  }
  // Vector `index`, whole, of data without a shift.
  __device__ __forceinline__ uint4 aligned(int64_t index) const { return load_stream(base + index * 16); }
  // Vector `index`, which must start inside the data; bytes past the end are 0.
  __device__ __forceinline__ uint4 shifted(int64_t index) const {
    const int64_t at = index * 16;
    const uint4 lo = load_block(base + at, end_bytes - at);
    return funnel(lo, load_block(base + at + 16, end_bytes - at - 16), shift);
  }
};

// A row of `size` elements.
template <typename T>
struct RowReader : VecReader {
  __device__ RowReader(const T* row, int64_t size) : VecReader(row, size * int64_t(sizeof(T))) {}
};

// ---- softmax statistics ------------------------------------------------------------------------------------------

// Of a set of scaled logits t (in units of log 2): max, and sums of e = 2^(t-max), e*(t-max) and e^2. Empty: (-inf, 0, 0, 0).
// Aligned as the stores are that hand it to another block: four floats in one.
struct alignas(16) Stats {
  float max, sum, dot, square;
};

__device__ __forceinline__ Stats empty_stats() { return {-INFINITY, 0.f, 0.f, 0.f}; }

__device__ __forceinline__ Stats rescale(const Stats& a, float max) {
  const float shift = a.max == -INFINITY ? 0.f : a.max - max;  // nothing to move: all sums are 0
  const float scale = exp2_fast(shift);
  return {max, a.sum * scale, scale * fmaf(shift, a.sum, a.dot), a.square * scale * scale};
}

__device__ __forceinline__ Stats merge(const Stats& a, const Stats& b) {
  const float max = max_nan(a.max, b.max);
  const Stats x = rescale(a, max), y = rescale(b, max);
  return {max, x.sum + y.sum, x.dot + y.dot, x.square + y.square};
}

// ---- reductions --------------------------------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(kFull, x, step);
  return x;
}

// Sum over a block of whole warps, the same bits in every thread. `scratch` has 33 entries; ends with a barrier.
template <typename T>
__device__ __forceinline__ T block_sum(T x, T* scratch) {
  x = warp_sum(x);
  const int warps = (blockDim.x + 31) >> 5;
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
  __syncthreads();
  if (threadIdx.x < 32) {
    T y = int(threadIdx.x) < warps ? scratch[threadIdx.x] : T(0);
    y = warp_sum(y);
    if (threadIdx.x == 0) scratch[32] = y;
  }
  __syncthreads();
  const T result = scratch[32];
  __syncthreads();
  return result;
}

__device__ __forceinline__ float warp_max_nan(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x = max_nan(x, __shfl_xor_sync(kFull, x, step));
  return x;
}

// The statistics of a warp, the same bits in every lane: the maximum first, then sums that are all relative to it.
template <bool DOT, bool SQUARE>
__device__ __forceinline__ Stats warp_merge(const Stats& a) {
  Stats st = rescale(a, warp_max_nan(a.max));
  st.sum = warp_sum(st.sum);
  if constexpr (DOT) st.dot = warp_sum(st.dot);
  if constexpr (SQUARE) st.square = warp_sum(st.square);
  return st;
}

// True in every thread of the last block to arrive, and only there: it then sees what all blocks wrote. Leaves the counter at 0.
__device__ __forceinline__ bool last_block(unsigned* counter, unsigned num_blocks) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {  // one thread's fences do: the barriers put the block's writes before them, and its reads behind them
    __threadfence();
    is_last = atomicAdd(counter, 1u) == num_blocks - 1;
    __threadfence();
    if (is_last) *counter = 0;
  }
  __syncthreads();
  return is_last;
}

}  // namespace rl
