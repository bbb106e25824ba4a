// The draw of a token from each row of logits, and its log-prob: one block reads the row once, in tiles of a warp. The uniform number
// that the cumulative distribution is inverted at is a hash of the row's stream and position, as in rl_csrc.inference.sampling.
#include "launch.cuh"
#include "common.cuh"

namespace rl {
namespace {

constexpr int kThreads = 512;
constexpr int kVecs = 4;          // of 16 bytes, that a lane has under way
constexpr int kMostTiles = 2048;  // of a row: whose statistics lie in shared memory

__device__ __forceinline__ uint64_t mix(uint64_t x) {  // SplitMix64's finaliser (Steele, Lea, Flood 2014)
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// In [0, 1): 52 bits, so that its product with a total stays below that.
__device__ __forceinline__ double uniform(int64_t stream, int64_t position) {
  const uint64_t bits = mix(uint64_t(stream) + uint64_t(position) * 0x9E3779B97F4A7C15ull);
  return double(bits >> 12) * 0x1p-52;
}

// Inclusive sums over the lanes of a warp.
__device__ __forceinline__ double warp_scan(double x) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const double left = __shfl_up_sync(kFull, x, step);
    if (lane >= step) x += left;
  }
  return x;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) draw_kernel(const rl_device_draw a) {
  constexpr int kPer = Element<T>::kPerVec, kStep = kWarp * kPer, kTile = kStep * kVecs;
  __shared__ float maxima[kMostTiles], sums[kMostTiles];
  __shared__ float tops[kThreads / kWarp];
  const int64_t row = blockIdx.x;
  const RowReader<T> reader(static_cast<const T*>(a.logits) + row * a.row_stride, a.vocab);
  const float scale = 1.f / a.temperature[row];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int num_tiles = int((a.vocab + kTile - 1) / kTile);
  // Scaled logits of vector `v` of a tile; -inf behind the row's end.
  const auto load = [&](int tile, int v, float(&x)[kPer]) {
    const int64_t first = int64_t(tile) * kTile + v * kStep + lane * kPer;
    if (first >= a.vocab) {
#pragma unroll
      for (int e = 0; e < kPer; ++e) x[e] = -INFINITY;
      return;
    }
    const int64_t index = first / kPer;
    unpack_vec<T>(reader.shift == 0 && first + kPer <= a.vocab ? reader.aligned(index) : reader.shifted(index), x);
#pragma unroll
    for (int e = 0; e < kPer; ++e) x[e] = first + e < a.vocab ? x[e] * scale : -INFINITY;
  };
  float top = -INFINITY;
  for (int tile = warp; tile < num_tiles; tile += kThreads / kWarp) {
    float x[kVecs][kPer], most = -INFINITY, sum = 0.f;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) load(tile, v, x[v]);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
#pragma unroll
      for (int e = 0; e < kPer; ++e) most = max_nan(most, x[v][e]);
    }
    most = warp_max_nan(most);
    const float shift = most == -INFINITY ? 0.f : most;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
#pragma unroll
      for (int e = 0; e < kPer; ++e) sum += exp2_fast((x[v][e] - shift) * kLog2e);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
      maxima[tile] = most;
      sums[tile] = sum;
    }
    top = max_nan(top, most);
  }
  if (lane == 0) tops[warp] = top;
  __syncthreads();
  if (warp != 0) return;
  top = warp_max_nan(lane < kThreads / kWarp ? tops[lane] : -INFINITY);
  const auto mass = [&](int tile) {
    return tile >= num_tiles || maxima[tile] == -INFINITY ? 0. : double(sums[tile]) * double(exp2_fast((maxima[tile] - top) * kLog2e));
  };
  double all = 0;
  for (int first = 0; first < num_tiles; first += kWarp) all += mass(first + lane);
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) all += __shfl_xor_sync(kFull, all, step);
  const bool is_greedy = a.is_greedy != nullptr && a.is_greedy[row] != 0;
  const double threshold = uniform(a.streams[row], a.positions[row]) * all;
  // The first tile in which the sum passes the threshold (or, greedily, that has the largest logit), and the sum before it.
  int chosen = -1, last = 0;
  double before = 0;
  for (int first = 0; first < num_tiles && chosen < 0; first += kWarp) {
    const double mine = mass(first + lane), upto = before + warp_scan(mine);
    const bool is_it = first + lane < num_tiles && (is_greedy ? maxima[first + lane] == top : mine > 0 && upto > threshold);
    const unsigned votes = __ballot_sync(kFull, is_it), some = __ballot_sync(kFull, mine > 0);
    if (some) last = first + 31 - __clz(some);
    if (votes) chosen = first + __ffs(votes) - 1;
    const double until = __shfl_sync(kFull, upto - mine, votes ? __ffs(votes) - 1 : 0);
    const double through = __shfl_sync(kFull, upto, 31);
    before = votes ? until : through;
  }
  if (chosen < 0) chosen = last;  // a NaN somewhere, or the last digits of a sum: the last tile with any mass
  int64_t found = -1, fallback = -1;
  for (int v = 0; v < kVecs && found < 0; ++v) {
    float x[kPer];
    load(chosen, v, x);
    double mine = 0;
#pragma unroll
    for (int e = 0; e < kPer; ++e) mine += double(exp2_fast((x[e] - top) * kLog2e));
    const double upto = before + warp_scan(mine);
    double here = upto - mine;
    int index = -1, some = -1;
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      const double p = double(exp2_fast((x[e] - top) * kLog2e));
      here += p;
      if (index < 0 && (is_greedy ? x[e] == top : p > 0 && here > threshold)) index = e;
      if (p > 0) some = e;
    }
    const unsigned votes = __ballot_sync(kFull, index >= 0), others = __ballot_sync(kFull, some >= 0);
    const int64_t first = int64_t(chosen) * kTile + v * kStep;
    if (votes) {
      const int from = __ffs(votes) - 1, e = __shfl_sync(kFull, index, from);
      found = first + from * kPer + e;
    } else if (others) {
      const int from = 31 - __clz(others), e = __shfl_sync(kFull, some, from);
      fallback = first + from * kPer + e;
    }
    before = __shfl_sync(kFull, upto, 31);
  }
  if (lane != 0) return;
  if (found < 0) found = fallback < 0 ? 0 : fallback;
  const float logit = Element<T>::to_float(static_cast<const T*>(a.logits)[row * a.row_stride + found]) * scale;
  a.ids[row] = found;
  a.logprobs[row] = logit - top - float(log(all));
}

}  // namespace
}  // namespace rl

extern "C" int rl_cuda_draw(const rl_device_draw* draw, void* stream) {
  using namespace rl;
  if (draw->rows == 0) return 0;
  return by_dtype(draw->dtype, [&](auto zero) {
    using T = decltype(zero);
    if (draw->vocab > int64_t(kMostTiles) * kWarp * kVecs * Element<T>::kPerVec) return int(RL_CUDA_NOT_SUPPORTED);
    return launch(draw_kernel<T>, draw->rows, kThreads, stream, *draw);
  });
}
