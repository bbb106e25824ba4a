// Backward recurrences (GAE, returns, TD(lambda), V-trace): one block per sequence, from its end to its start in tiles.
//
// A token maps the state behind it to the state at it. The state is (carry, next value, shown advantage); the map is affine, so
// maps compose, and a block composes a tile's tokens by a parallel scan.
#include "launch.cuh"
#include "common.cuh"

namespace rl {
namespace {

constexpr int kThreads = 512;
constexpr int kPad = 32;  // one unused entry after so many, against bank conflicts

struct State {
  float carry, value, shown;
};

// carry' = cc * carry + cv * value + c;  value' = vv * value + v;  shown' = sc * carry + sv * value + ss * shown + s.
struct Map {
  float cc, cv, c, vv, v, sc, sv, ss, s;
};

__device__ __forceinline__ Map identity() { return {1.f, 0.f, 0.f, 1.f, 0.f, 0.f, 0.f, 1.f, 0.f}; }

__device__ __forceinline__ State apply(const Map& m, const State& x) {
  return {fmaf(m.cc, x.carry, fmaf(m.cv, x.value, m.c)), fmaf(m.vv, x.value, m.v),
          fmaf(m.sc, x.carry, fmaf(m.sv, x.value, fmaf(m.ss, x.shown, m.s)))};
}

// `left` after `right`: time runs backward, so the right-hand tokens act first.
__device__ __forceinline__ Map compose(const Map& left, const Map& right) {
  Map m;
  m.cc = left.cc * right.cc;
  m.cv = fmaf(left.cc, right.cv, left.cv * right.vv);
  m.c = fmaf(left.cc, right.c, fmaf(left.cv, right.v, left.c));
  m.vv = left.vv * right.vv;
  m.v = fmaf(left.vv, right.v, left.v);
  m.sc = fmaf(left.sc, right.cc, left.ss * right.sc);
  m.sv = fmaf(left.sc, right.cv, fmaf(left.sv, right.vv, left.ss * right.sv));
  m.ss = left.ss * right.ss;
  m.s = fmaf(left.sc, right.c, fmaf(left.sv, right.v, fmaf(left.ss, right.s, left.s)));
  return m;
}

__device__ __forceinline__ Map shuffle_down(const Map& m, int step) {
  return {__shfl_down_sync(kFull, m.cc, step), __shfl_down_sync(kFull, m.cv, step), __shfl_down_sync(kFull, m.c, step),
          __shfl_down_sync(kFull, m.vv, step), __shfl_down_sync(kFull, m.v, step),  __shfl_down_sync(kFull, m.sc, step),
          __shfl_down_sync(kFull, m.sv, step), __shfl_down_sync(kFull, m.ss, step), __shfl_down_sync(kFull, m.s, step)};
}

// In: each lane's map. Out: the maps of this lane and all lanes to its right composed.
__device__ __forceinline__ Map warp_suffix(Map m) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const Map right = shuffle_down(m, step);
    if (lane + step < 32) m = compose(m, right);
  }
  return m;
}

struct Token {
  float reward, value, rho;
  bool on, real;
};

// For the kinds whose shown advantage follows from the carry, the map's last row is not computed: `shown` is then unused.
template <int KIND>
__device__ __forceinline__ Map token_map(const rl_device_scan& a, const Token& t, float lam) {
  if (!t.real) return identity();
  if (!t.on) return a.mask_mode == RL_ZERO ? Map{} : identity();
  const float decay = a.gamma * lam, delta = t.reward - t.value;
  if constexpr (KIND == RL_RETURNS) {  // carry is the return
    return {a.gamma, 0.f, t.reward, 0.f, t.value, 0.f, 0.f, 0.f, 0.f};
  } else if constexpr (KIND == RL_VTRACE) {  // carry is v - V; shown = bound * (r + gamma * (V' + carry') - V)
    const float bound = fminf(t.rho, a.rho_clip), trace = fminf(t.rho, a.c_clip);
    return {decay * trace, bound * a.gamma, bound * delta, 0.f, t.value, bound * a.gamma, bound * a.gamma, 0.f, bound * delta};
  } else {  // carry is the advantage
    return {decay, a.gamma, delta, 0.f, t.value, 0.f, 0.f, 0.f, 0.f};
  }
}

__device__ __forceinline__ int padded(int i) { return i + i / kPad; }

template <int KIND, int PER>
__global__ void __launch_bounds__(kThreads) scan_kernel(const rl_device_scan a) {
  constexpr int kTile = kThreads * PER;
  constexpr bool kRho = KIND == RL_VTRACE;
  __shared__ float rewards[kTile + kTile / kPad], values[kTile + kTile / kPad];  // in: inputs; out: advantages and returns
  __shared__ float rhos[kRho ? kTile + kTile / kPad : 1];
  __shared__ uint8_t on[kTile];
  __shared__ Map by_warp[kThreads / 32];
  __shared__ State behind;  // of the tile: the state at its right edge
  const int64_t begin = a.cu_seqlens[blockIdx.x], end = a.cu_seqlens[blockIdx.x + 1];
  const float lam = a.lam ? a.lam[blockIdx.x] : a.scalar_lam;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const bool all = a.loss_mask == nullptr || a.mask_mode == RL_NONE;
  if (threadIdx.x == 0) {
    const float boot = a.bootstrap_values ? a.bootstrap_values[blockIdx.x] : 0.f;
    behind = {KIND == RL_RETURNS ? boot : 0.f, boot, 0.f};
  }
  for (int64_t right = end; right > begin; right -= kTile) {
    const int64_t left = right - kTile;  // may lie before `begin`: those tokens are not real
#pragma unroll
    for (int j = 0; j < PER; ++j) {
      const int at = j * kThreads + threadIdx.x;
      const int64_t t = left + at;
      const bool counted = t >= begin && (all || a.loss_mask[t] != 0);
      const float reward = t >= begin ? a.rewards[t] : 0.f;  // fetched whether it counts or not: no wait for the mask
      const float value = t >= begin && a.values ? a.values[t] : 0.f;
      const float rho = kRho && t >= begin && a.rho ? a.rho[t] : 1.f;
      on[at] = counted;
      rewards[padded(at)] = counted ? reward : 0.f;
      values[padded(at)] = counted ? value : 0.f;
      if constexpr (kRho) rhos[padded(at)] = counted ? rho : 1.f;
    }
    __syncthreads();
    Token tokens[PER];
    Map mine = identity();
#pragma unroll
    for (int j = PER - 1; j >= 0; --j) {
      const int at = threadIdx.x * PER + j;
      tokens[j] = {rewards[padded(at)], values[padded(at)], kRho ? rhos[kRho ? padded(at) : 0] : 1.f, on[at] != 0, left + at >= begin};
      mine = compose(token_map<KIND>(a, tokens[j], lam), mine);
    }
    const Map suffix = warp_suffix(mine);
    if (lane == 0) by_warp[warp] = suffix;
    __syncthreads();
    State state = behind;
    for (int w = kThreads / 32 - 1; w > warp; --w) state = apply(by_warp[w], state);
    const Map right_of_me = shuffle_down(suffix, 1);
    if (lane < 31) state = apply(right_of_me, state);
#pragma unroll
    for (int j = PER - 1; j >= 0; --j) {
      const int at = threadIdx.x * PER + j;
      const bool shows = tokens[j].on || a.mask_mode == RL_HOLD;
      state = apply(token_map<KIND>(a, tokens[j], lam), state);
      // the state's value is that of the next counted token, this one included; behind the last it is the bootstrap
      const float advantage = KIND == RL_VTRACE ? state.shown : KIND == RL_RETURNS ? state.carry - state.value : state.carry;
      const float ret = KIND == RL_RETURNS ? state.carry : state.value + state.carry;
      rewards[padded(at)] = shows ? advantage : 0.f;
      values[padded(at)] = shows ? ret : 0.f;
    }
    __syncthreads();
    if (threadIdx.x == 0) behind = state;
#pragma unroll
    for (int j = 0; j < PER; ++j) {
      const int at = j * kThreads + threadIdx.x;
      if (left + at < begin) continue;
      a.advantages[left + at] = rewards[padded(at)];
      a.returns[left + at] = values[padded(at)];
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace rl

extern "C" int rl_cuda_scan_reverse(const rl_device_scan* scan, void* stream) {
  using namespace rl;
  if (scan->sequences == 0) return 0;
  auto* kernel = scan->kind == RL_VTRACE    ? scan_kernel<RL_VTRACE, 4>
                 : scan->kind == RL_RETURNS ? scan_kernel<RL_RETURNS, 8>
                                            : scan_kernel<RL_GAE, 8>;
  return launch(kernel, scan->sequences, kThreads, stream, *scan);
}
