// What a decoder's layer does between its matrix products: the residual sum with its norm, heads' norms with rotation and the way into
// the paged cache, the gated activation. Each is one launch in place of five to twenty, whose time a decode step is mostly made of.
//
// Numbers are rounded where the modules of transformers round them; only the order of a norm's sum is another.
#include "launch.cuh"
#include "common.cuh"

namespace rl {
namespace {

constexpr int kNormThreads = 256;
constexpr int kHeadThreads = 128;  // four heads of a token
constexpr int kMostPairs = 4;      // of a lane: heads of up to 256 numbers
constexpr int kGateThreads = 256;

// The number that `x` is when it is stored as T.
template <typename T>
__device__ __forceinline__ float rounded(float x) {
  return Element<T>::to_float(Element<T>::from_float(x));
}

template <typename T>
__device__ __forceinline__ T normed(float x, float scale, T weight) {
  return Element<T>::from_float(Element<T>::to_float(weight) * rounded<T>(x * scale));
}

// A block for each token: residual += x, then its RMS norm.
template <typename T>
__global__ void __launch_bounds__(kNormThreads) add_norm_kernel(const rl_device_add_norm a) {
  __shared__ float scratch[33];
  const int64_t first = int64_t(blockIdx.x) * a.size;
  T* residual = static_cast<T*>(a.residual) + first;
  const T* x = a.x == nullptr ? nullptr : static_cast<const T*>(a.x) + first;
  float square = 0.f;
  for (int64_t i = threadIdx.x; i < a.size; i += kNormThreads) {
    float sum = Element<T>::to_float(residual[i]);
    if (x != nullptr) {
      const T stored = Element<T>::from_float(sum + Element<T>::to_float(x[i]));
      residual[i] = stored;
      sum = Element<T>::to_float(stored);
    }
    square = fmaf(sum, sum, square);
  }
  const float scale = rsqrtf(block_sum(square, scratch) / float(a.size) + a.eps);
  const T* weight = static_cast<const T*>(a.weight);
  for (int64_t i = threadIdx.x; i < a.size; i += kNormThreads)  // each thread reads what it wrote
    static_cast<T*>(a.out)[first + i] = normed<T>(Element<T>::to_float(residual[i]), scale, weight[i]);
}

// A warp for each token and head of query, key or value. A head is [first half | second half]; lanes hold pairs of the two.
template <typename T>
__global__ void __launch_bounds__(kHeadThreads) rotate_kernel(const rl_device_rotate a) {
  const int64_t heads = a.heads + 2 * a.kv_heads;
  const int64_t item = int64_t(blockIdx.x) * (kHeadThreads / kWarp) + (threadIdx.x >> 5);
  if (item >= a.tokens * heads) return;  // the whole warp
  const int lane = threadIdx.x & 31, half = int(a.size / 2);
  const int64_t token = item / heads, head = item % heads, position = a.positions[token];
  const T* from = static_cast<const T*>(a.qkv) + item * a.size;
  const bool is_query = head < a.heads, is_key = !is_query && head < a.heads + a.kv_heads;
  T* to;
  if (is_query) {
    to = static_cast<T*>(a.query) + (token * a.heads + head) * a.size;
  } else {
    const int64_t page = position / a.page_size;
    const int64_t slot = a.block_tables[a.rows[token] * a.table_columns + page] * a.page_size + (position - page * a.page_size);
    const int64_t kv = head - a.heads - (is_key ? 0 : a.kv_heads);
    to = static_cast<T*>(is_key ? a.key_cache : a.value_cache) + (slot * a.kv_heads + kv) * a.size;
  }
  const T* norm = static_cast<const T*>(is_query ? a.query_norm : is_key ? a.key_norm : nullptr);
  float left[kMostPairs], right[kMostPairs], square = 0.f;
#pragma unroll
  for (int p = 0; p < kMostPairs; ++p) {
    const int i = p * kWarp + lane;
    if (i >= half) continue;
    left[p] = Element<T>::to_float(from[i]);
    right[p] = Element<T>::to_float(from[half + i]);
    square = fmaf(left[p], left[p], fmaf(right[p], right[p], square));
  }
  const float scale = norm == nullptr ? 0.f : rsqrtf(warp_sum(square) / float(a.size) + a.eps);
#pragma unroll
  for (int p = 0; p < kMostPairs; ++p) {
    const int i = p * kWarp + lane;
    if (i >= half) continue;
    float x = left[p], y = right[p];
    if (norm != nullptr) {
      x = Element<T>::to_float(normed<T>(x, scale, norm[i]));
      y = Element<T>::to_float(normed<T>(y, scale, norm[half + i]));
    }
    if (is_query || is_key) {
      const float cos = Element<T>::to_float(static_cast<const T*>(a.cos)[position * half + i]);
      const float sin = Element<T>::to_float(static_cast<const T*>(a.sin)[position * half + i]);
      const float turned = rounded<T>(x * cos) - rounded<T>(y * sin);
      y = rounded<T>(y * cos) + rounded<T>(x * sin);
      x = turned;
    }
    to[i] = Element<T>::from_float(x);
    to[half + i] = Element<T>::from_float(y);
  }
}

// silu(gate) * up, 16 bytes a thread; `gate_up` is [tokens, 2, vectors].
template <typename T>
__global__ void __launch_bounds__(kGateThreads) gate_kernel(const uint4* gate_up, uint4* out, int64_t tokens, int64_t vectors) {
  constexpr int kPer = Element<T>::kPerVec;
  const int64_t at = int64_t(blockIdx.x) * kGateThreads + threadIdx.x;
  if (at >= tokens * vectors) return;
  const int64_t token = at / vectors, first = token * 2 * vectors + (at - token * vectors);
  float gate[kPer], up[kPer];
  unpack_vec<T>(load_plain(gate_up + first), gate);
  unpack_vec<T>(load_plain(gate_up + first + vectors), up);
#pragma unroll
  for (int e = 0; e < kPer; ++e) gate[e] = rounded<T>(gate[e] / (1.f + expf(-gate[e]))) * up[e];
  out[at] = pack_vec<T>(gate);
}

}  // namespace
}  // namespace rl

extern "C" int rl_cuda_add_norm(const rl_device_add_norm* arguments, void* stream) {
  using namespace rl;
  if (arguments->tokens == 0) return 0;
  return by_dtype(arguments->dtype, [&](auto zero) {
    return launch(add_norm_kernel<decltype(zero)>, arguments->tokens, kNormThreads, stream, *arguments);
  });
}

extern "C" int rl_cuda_rotate(const rl_device_rotate* arguments, void* stream) {
  using namespace rl;
  const rl_device_rotate& a = *arguments;
  if (a.tokens == 0) return 0;
  if (a.size % 2 || a.size > 2 * kMostPairs * kWarp) return RL_CUDA_NOT_SUPPORTED;
  const int64_t warps = a.tokens * (a.heads + 2 * a.kv_heads);
  return by_dtype(a.dtype, [&](auto zero) {
    return launch(rotate_kernel<decltype(zero)>, ceil_div(warps, kHeadThreads / kWarp), kHeadThreads, stream, a);
  });
}

extern "C" int rl_cuda_gate(const void* gate_up, void* out, int64_t tokens, int64_t size, int dtype, void* stream) {
  using namespace rl;
  if (tokens == 0) return 0;
  const int64_t bytes = size * (dtype == RL_F32 ? 4 : 2);
  if (bytes % 16) return RL_CUDA_NOT_SUPPORTED;
  return by_dtype(dtype, [&](auto zero) {
    return launch(gate_kernel<decltype(zero)>, ceil_div(tokens * bytes / 16, kGateThreads), kGateThreads, stream,
                  static_cast<const uint4*>(gate_up), static_cast<uint4*>(out), tokens, bytes / 16);
  });
}
