// Group advantages and batch moments, two passes in float64.
#include "common.cuh"
#include "launch.cuh"

namespace rl {
namespace {

constexpr int kWarps = 4;
constexpr int kListed = 64;        // members of a group that a warp remembers
constexpr int kShared = 4096;      // ids that a block keeps in shared memory

// Members of one group in index order, read through `at`; lane k takes members k, k + 32, ..., so that a group's bits do not
// depend on where it stands.
template <typename At>
__device__ __forceinline__ void write_group(const At& at, const float* rewards, int64_t count, int mode, double eps, float* out) {
  const int lane = threadIdx.x & 31;
  const double origin = rewards[at(0)];
  double sum = 0.0;
  for (int64_t k = lane; k < count; k += 32) sum += double(rewards[at(k)]) - origin;
  const double mean = warp_sum(sum) / double(count);
  double square = 0.0;
  for (int64_t k = lane; k < count; k += 32) {
    const double centred = double(rewards[at(k)]) - origin - mean;
    square += centred * centred;
  }
  square = warp_sum(square);
  const double others = count > 1 ? double(count - 1) : 1.0;
  const double deviation = sqrt(square / others) + eps;
  for (int64_t k = lane; k < count; k += 32) {
    const double reward = rewards[at(k)], centred = reward - origin - mean;
    double advantage = centred;
    if (mode == 2) advantage = centred * double(count) / others;
    if (mode == 0) advantage = count == 1 ? reward : centred / deviation;
    out[at(k)] = float(advantage);
  }
}

__global__ void __launch_bounds__(kWarps * 32) adjacent_kernel(const float* rewards, const int64_t* cu, int64_t groups, int mode,
                                                               double eps, float* out) {
  const int64_t g = int64_t(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  if (g >= groups) return;
  const int64_t begin = cu[g], count = cu[g + 1] - begin;
  if (count > 0) write_group([&](int64_t k) { return begin + k; }, rewards, count, mode, eps, out);
}

// 32 bits of an id: most that differ, differ here.
__device__ __forceinline__ uint32_t short_id(int64_t id) { return uint32_t(uint64_t(id) ^ (uint64_t(id) >> 32)); }

// One warp per reward; the first member of a group, by index, does the whole group. SHARED: all ids, shortened, are kept in shared
// memory; a match there is looked up.
template <int WARPS, bool SHARED>
__global__ void __launch_bounds__(WARPS * 32) scattered_kernel(const float* rewards, const int64_t* ids, int rows, int mode, double eps,
                                                               float* out) {
  __shared__ int listed[WARPS][kListed];
  __shared__ uint4 kept[SHARED ? kShared / 4 : 1];
  if constexpr (SHARED) {
    uint32_t* words = reinterpret_cast<uint32_t*>(kept);
#pragma unroll
    for (int u = 0; u < kShared / (WARPS * 32); ++u) {
      const int j = u * WARPS * 32 + int(threadIdx.x);
      words[j] = j < rows ? short_id(ids[j]) : 0;
    }
    __syncthreads();
  }
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int i = int(blockIdx.x) * WARPS + warp;
  if (i >= rows) return;
  const int64_t id = ids[i];
  if (i > 0 && ids[i - 1] == id) return;  // most groups stand together
  const uint32_t key = short_id(id);
  int count = 0;
  for (int base = 0; base < rows; base += 128) {  // four neighbours per lane
    if constexpr (SHARED) {  // pass quickly over what holds no match
      constexpr int kAhead = 4;
      unsigned any = 0;
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const uint4 v = kept[min(base / 4 + u * 32 + lane, kShared / 4 - 1)];
        any |= unsigned(v.x == key) | unsigned(v.y == key) | unsigned(v.z == key) | unsigned(v.w == key);
      }
      if (!__any_sync(kFull, any)) {
        base += 128 * (kAhead - 1);
        continue;
      }
    }
    const int first = base + lane * 4;
    unsigned match = 15;
    if constexpr (SHARED) {
      const uint4 v = kept[first / 4];
      match = unsigned(v.x == key) | unsigned(v.y == key) << 1 | unsigned(v.z == key) << 2 | unsigned(v.w == key) << 3;
      if (!__any_sync(kFull, match)) continue;
    }
    unsigned exact = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) exact |= unsigned(((match >> c) & 1) && first + c < rows && ids[first + c] == id) << c;
    const unsigned lanes = __ballot_sync(kFull, exact != 0);
    if (lanes == 0) continue;
    const int found = __popc(exact);
    int before = found;  // inclusive sum over the lanes
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int left = __shfl_up_sync(kFull, before, step);
      if (lane >= step) before += left;
    }
    const int total = __shfl_sync(kFull, before, 31);
    if (count == 0) {
      const int lowest = __shfl_sync(kFull, first + __ffs(exact) - 1, __ffs(lanes) - 1);
      if (lowest < i) return;  // another warp's group
    }
    int place = count + before - found;
    for (unsigned bits = exact; bits; bits &= bits - 1, ++place)
      if (place < kListed) listed[warp][place] = first + __ffs(bits) - 1;
    count += total;
  }
  __syncwarp();
  if (count <= kListed) {
    write_group([&](int64_t k) { return int64_t(listed[warp][k]); }, rewards, count, mode, eps, out);
    return;
  }
  // A group too large to list: every lane walks its members in order.
  const double origin = rewards[i];
  const auto walk = [&](auto&& visit) {
    for (int first = i; first < rows; first += 32) {
      const int j = first + lane;
      unsigned votes = __ballot_sync(kFull, j < rows && ids[j < rows ? j : 0] == id);
      for (; votes; votes &= votes - 1) visit(first + __ffs(votes) - 1);
    }
  };
  double sum = 0.0, square = 0.0;
  walk([&](int j) { sum += double(rewards[j]) - origin; });
  const double mean = sum / double(count);
  walk([&](int j) {
    const double centred = double(rewards[j]) - origin - mean;
    square += centred * centred;
  });
  const double others = double(count - 1), deviation = sqrt(square / others) + eps;
  for (int j = i + lane; j < rows; j += 32) {
    if (ids[j] != id) continue;
    const double centred = double(rewards[j]) - origin - mean;
    out[j] = float(mode == 2 ? centred * double(count) / others : mode == 0 ? centred / deviation : centred);
  }
}

constexpr int kThreads = 512;
constexpr int kPerThread = 8;
constexpr int kTile = kThreads * kPerThread;

struct Moments {
  double count, mean, m2;
};

__device__ __forceinline__ Moments join(const Moments& a, const Moments& b) {
  const double count = a.count + b.count;
  if (count == 0.0) return a;
  const double delta = b.mean - a.mean;
  return {count, a.mean + delta * (b.count / count), a.m2 + b.m2 + delta * delta * (a.count * b.count / count)};
}

// Each block takes the moments of its tile in two passes over registers; the last block joins them in block order.
__global__ void __launch_bounds__(kThreads) moments_kernel(const float* x, const uint8_t* mask, int64_t size, double* moments,
                                                           double* partials, uint32_t* counter) {
  __shared__ double scratch[33];
  float v[kPerThread];
  bool on[kPerThread];
  double count = 0.0, sum = 0.0;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int64_t i = int64_t(blockIdx.x) * kTile + j * kThreads + threadIdx.x;
    on[j] = i < size && (mask == nullptr || mask[i] != 0);
    v[j] = on[j] ? x[i] : 0.f;
    count += on[j] ? 1.0 : 0.0;
    sum += v[j];
  }
  count = block_sum(count, scratch);
  const double mean = count > 0.0 ? block_sum(sum, scratch) / count : 0.0;
  double square = 0.0;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const double centred = on[j] ? double(v[j]) - mean : 0.0;
    square += centred * centred;
  }
  square = block_sum(square, scratch);
  if (threadIdx.x == 0) {
    double* mine = partials + int64_t(blockIdx.x) * 3;
    mine[0] = count, mine[1] = mean, mine[2] = square;
  }
  if (!last_block(counter, gridDim.x) || threadIdx.x >= 32) return;
  Moments total{0.0, 0.0, 0.0};
  for (unsigned b = threadIdx.x; b < gridDim.x; b += 32) {
    const double* p = partials + int64_t(b) * 3;
    total = join(total, {__ldcg(p), __ldcg(p + 1), __ldcg(p + 2)});
  }
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) {
    const Moments right{__shfl_down_sync(kFull, total.count, step), __shfl_down_sync(kFull, total.mean, step),
                        __shfl_down_sync(kFull, total.m2, step)};
    total = join(total, right);
  }
  if (threadIdx.x == 0) moments[0] = total.count, moments[1] = total.mean, moments[2] = total.m2;
}

__global__ void __launch_bounds__(kThreads) whiten_kernel(const float* x, const uint8_t* mask, int64_t size, const double* moments,
                                                          bool shift_mean, double eps, float* out) {
  const double mean = moments[1], variance = moments[2] / (moments[0] > 2.0 ? moments[0] - 1.0 : 1.0);
  const double scale = 1.0 / sqrt(variance + eps), offset = shift_mean ? 0.0 : mean;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int64_t i = int64_t(blockIdx.x) * kTile + j * kThreads + threadIdx.x;
    if (i >= size) return;
    const bool on = mask == nullptr || mask[i] != 0;
    out[i] = on ? float((double(x[i]) - mean) * scale + offset) : 0.f;
  }
}

}  // namespace
}  // namespace rl

extern "C" int rl_cuda_group_norm(const float* rewards, const int64_t* group_ids, const int64_t* cu_groups, int64_t rows,
                                  int64_t groups, int32_t mode, float eps, float* advantages, void* stream) {
  using namespace rl;
  if ((group_ids ? rows : groups) == 0) return 0;
  if (group_ids == nullptr) {
    return launch(adjacent_kernel, ceil_div(groups, kWarps), kWarps * 32, stream, rewards, cu_groups, groups, mode, double(eps), advantages);
  }
  const int warps = rows <= kShared ? 32 : kWarps;
  auto* kernel = rows <= kShared ? scattered_kernel<32, true> : scattered_kernel<kWarps, false>;
  return launch(kernel, ceil_div(rows, warps), warps * 32, stream, rewards, group_ids, int(rows), mode, double(eps), advantages);
}

extern "C" int64_t rl_cuda_moments_blocks(int64_t size) { return size > 0 ? rl::ceil_div(size, rl::kTile) : 1; }

extern "C" int rl_cuda_masked_moments(const float* x, const uint8_t* mask, int64_t size, double* moments, double* partials,
                                      uint32_t* counter, void* stream) {
  using namespace rl;
  return launch(moments_kernel, rl_cuda_moments_blocks(size), kThreads, stream, x, mask, size, moments, partials, counter);
}

extern "C" int rl_cuda_whiten(const float* x, const uint8_t* mask, int64_t size, const double* moments, int32_t shift_mean,
                              double eps, float* out, void* stream) {
  using namespace rl;
  if (size == 0) return 0;
  return launch(whiten_kernel, ceil_div(size, kTile), kThreads, stream, x, mask, size, moments, shift_mean != 0, eps, out);
}
