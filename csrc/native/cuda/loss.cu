// Policy loss, its gradient and its metrics in one launch. Blocks write partial sums; the last block to finish adds them in block
// order, so the result has the same bits at every run.
#include "launch.cuh"
#include "loss.cuh"

namespace rl {
namespace {

constexpr int kThreads = 384;  // a warp for each metric when the sums are added up
constexpr int kPerThread = 4;
constexpr int kParts = 2;
constexpr int kTile = kThreads * kPerThread * kParts;
constexpr int kMetrics = RL_NUM_METRICS;
// The order of METRIC_NAMES in rl_csrc/types.py.
enum Metric { kPolicy, kKl, kEntropy, kTokens, kSequences, kLogRatio, kK3, kHigh, kLow, kDual, kRatio, kRatioSquared };

struct Sums {
  float x[kMetrics];
};

// One masked token's share of the sums and its gradients. PLAIN: no reference, weight or entropy.
template <bool PLAIN>
__device__ __forceinline__ void add_token(const rl_loss_spec& s, const Term& t, float lp, float old, float weight, float ref,
                                          bool has_ref, float entropy, float scale, Sums& sums, float& grad) {
  const float d = lp - old;
  if constexpr (PLAIN) {
    sums.x[kPolicy] += t.loss * scale;
    grad = t.grad * scale;
  } else {
    const Kl kl = has_ref ? kl_of(s, lp - ref) : Kl{0.f, 0.f};
    sums.x[kPolicy] += t.loss * weight * scale;
    sums.x[kKl] += kl.value * scale;
    sums.x[kEntropy] += entropy * scale;
    grad = (t.grad * weight + s.kl_coef * kl.grad) * scale;
  }
  sums.x[kTokens] += 1.f;
  sums.x[kLogRatio] += d;
  sums.x[kK3] += ratio_of(d) - 1.f - d;
  sums.x[kHigh] += t.high;
  sums.x[kLow] += t.low;
  sums.x[kDual] += t.dual;
  sums.x[kRatio] += t.ratio;
  sums.x[kRatioSquared] += t.ratio * t.ratio;
}

// Store this block's sums; the last block adds all of them up and writes loss and metrics.
__device__ __forceinline__ void finish(const rl_loss_spec& s, const rl_loss_io& io, Sums sums, unsigned num_blocks) {
  __shared__ float by_warp[kMetrics][kThreads / 32];
  __shared__ double totals[kMetrics];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
  for (int m = 0; m < kMetrics; ++m) {
    const float x = warp_sum(sums.x[m]);
    if (lane == 0) by_warp[m][warp] = x;
  }
  __syncthreads();
  if (threadIdx.x < kMetrics) {
    float x = 0.f;
    for (int w = 0; w < kThreads / 32; ++w) x += by_warp[threadIdx.x][w];
    io.partials[int64_t(threadIdx.x) * num_blocks + blockIdx.x] = x;
  }
  if (!last_block(io.counter, num_blocks)) return;
  if (warp < kMetrics) {
    double x = 0.0;
    const float* partial = io.partials + int64_t(warp) * num_blocks;
#pragma unroll 8
    for (unsigned b = lane; b < num_blocks; b += 32) x += double(__ldcg(partial + b));
    x = warp_sum(x);
    if (lane == 0) {
      totals[warp] = x;
      io.metrics[warp] = float(x);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) *io.loss = float(totals[kPolicy] + s.kl_coef * totals[kKl] - s.entropy_coef * totals[kEntropy]);
}

struct Four {
  float x[kPerThread];
};

// Four neighbours from `first`; zeros past the end or without a pointer.
__device__ __forceinline__ Four load4(const float* p, int64_t first, int64_t size, float missing) {
  Four f{{missing, missing, missing, missing}};
  if (p == nullptr) return f;
  if (first + 4 <= size && (reinterpret_cast<uintptr_t>(p) & 15) == 0) {
    const float4 v = __ldcs(reinterpret_cast<const float4*>(p + first));
    return {{v.x, v.y, v.z, v.w}};
  }
  for (int j = 0; j < kPerThread; ++j)
    if (first + j < size) f.x[j] = p[first + j];
  return f;
}

__device__ __forceinline__ void store4(float* p, int64_t first, int64_t size, const Four& f) {
  if (first + 4 <= size && (reinterpret_cast<uintptr_t>(p) & 15) == 0) {
    *reinterpret_cast<float4*>(p + first) = make_float4(f.x[0], f.x[1], f.x[2], f.x[3]);
    return;
  }
  for (int j = 0; j < kPerThread; ++j)
    if (first + j < size) p[first + j] = f.x[j];
}

__device__ __forceinline__ uint32_t load_mask4(const uint8_t* p, int64_t first, int64_t size) {
  if (first + 4 <= size && (reinterpret_cast<uintptr_t>(p) & 3) == 0) return *reinterpret_cast<const uint32_t*>(p + first);
  uint32_t bits = 0;
  for (int j = 0; j < kPerThread; ++j)
    if (first + j < size) bits |= uint32_t(p[first + j] != 0) << (8 * j);
  return bits;
}

// 1 in one lane per sequence of this warp's share that has a masked token.
__device__ __forceinline__ float live_sequences(const rl_loss_io& io, const uint8_t* mask, unsigned block, unsigned num_blocks) {
  const int lane = threadIdx.x & 31;
  const int64_t warps = int64_t(num_blocks) * (kThreads / 32);
  float live = 0.f;
  for (int64_t b = int64_t(block) * (kThreads / 32) + (threadIdx.x >> 5); b < io.sequences; b += warps) {
    const int64_t end = io.cu_seqlens[b + 1];
    bool any = false;
    for (int64_t t = io.cu_seqlens[b]; t < end && !any; t += 32) any = __any_sync(kFull, t + lane < end && mask[t + lane] != 0);
    if (any && lane == 0) live += 1.f;
  }
  return live;
}

// A loss whose tokens need nothing of each other: four neighbours per thread at a time. Blocks from `token_blocks` on count the
// sequences that have a masked token.
// LOSS: known when compiled, or -1. PLAIN: no reference, weights or entropies.
template <int LOSS, bool PLAIN>
__global__ void __launch_bounds__(kThreads, 3) token_kernel(const rl_loss_spec given, const rl_loss_tokens in, const rl_loss_io io,
                                                            unsigned token_blocks) {
  rl_loss_spec s = given;
  if constexpr (LOSS >= 0) s.loss = LOSS;
  const float scale = 1.f / denominator_of(in);
  Sums sums{};
  if (blockIdx.x >= token_blocks) {
    sums.x[kSequences] = live_sequences(io, in.loss_mask, blockIdx.x - token_blocks, gridDim.x - token_blocks);
    finish(s, io, sums, gridDim.x);
    return;
  }
#pragma unroll 1
  for (int part = 0; part < kParts; ++part) {
    const int64_t first = int64_t(blockIdx.x) * kTile + part * (kThreads * kPerThread) + threadIdx.x * kPerThread;
    const Four lp = load4(io.logprobs, first, io.tokens, 0.f), old = load4(in.old_logprobs, first, io.tokens, 0.f);
    const Four advantage = load4(in.advantages, first, io.tokens, 0.f);
    const Four weight = load4(PLAIN ? nullptr : in.weights, first, io.tokens, 1.f);
    const Four ref = load4(PLAIN ? nullptr : in.ref_logprobs, first, io.tokens, 0.f);
    const Four entropy = load4(PLAIN ? nullptr : io.entropy, first, io.tokens, 0.f);
    const uint32_t mask = load_mask4(in.loss_mask, first, io.tokens);
    Four grad{}, grad_entropy{};
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (((mask >> (8 * j)) & 0xff) == 0) continue;
      const Term t = token_term(s, lp.x[j], old.x[j], advantage.x[j], 0.f);
      add_token<PLAIN>(s, t, lp.x[j], old.x[j], weight.x[j], ref.x[j], in.ref_logprobs != nullptr, entropy.x[j], scale, sums,
                       grad.x[j]);
      grad_entropy.x[j] = -s.entropy_coef * scale;
    }
    store4(io.grad_logprobs, first, io.tokens, grad);
    if (!PLAIN && io.grad_entropy) store4(io.grad_entropy, first, io.tokens, grad_entropy);
  }
  finish(s, io, sums, gridDim.x);
}

// A loss or an aggregation that needs its sequence first: one block per sequence.
__global__ void __launch_bounds__(kThreads) sequence_kernel(const rl_loss_spec s, const rl_loss_tokens in, const rl_loss_io io) {
  __shared__ float scratch[33];
  const int64_t begin = io.cu_seqlens[blockIdx.x], end = io.cu_seqlens[blockIdx.x + 1];
  float count = 0.f, sum = 0.f, pull = 0.f;
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads) {
    if (in.loss_mask[t] == 0) continue;
    const float d = io.logprobs[t] - in.old_logprobs[t], a = in.advantages[t];
    bool high = false, low = false;
    if (s.loss == RL_GMPO) gmpo_bounds(s, d, a, &high, &low);
    count += 1.f;
    sum += high ? s.clip_high : low ? -s.clip_low : d;
    pull += -a * (in.weights ? in.weights[t] : 1.f);
  }
  count = block_sum(count, scratch);
  const float mean = block_sum(sum, scratch) / fmaxf(count, 1.f);
  const float share = s.aggregation == RL_SEQ_MEAN_TOKEN_MEAN ? 1.f / fmaxf(count, 1.f) : 1.f;
  const float scale = in.denominators ? 1.f / in.denominators[blockIdx.x] : share / denominator_of(in);
  // gmpo: every unbounded token moves the shared ratio by 1 / count, and all tokens' losses with it
  const float ratio = ratio_of(mean);
  const float gmpo_grad = s.loss == RL_GMPO ? block_sum(pull, scratch) * ratio_grad(mean, ratio) / fmaxf(count, 1.f) * scale : 0.f;
  Sums sums{};
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads) {
    float grad = 0.f, grad_entropy = 0.f;
    if (in.loss_mask[t] != 0) {
      const float lp = io.logprobs[t], old = in.old_logprobs[t], a = in.advantages[t];
      const Term term = token_term(s, lp, old, a, ratio);
      add_token<false>(s, term, lp, old, in.weights ? in.weights[t] : 1.f, in.ref_logprobs ? in.ref_logprobs[t] : 0.f,
                in.ref_logprobs != nullptr, io.entropy ? io.entropy[t] : 0.f, scale, sums, grad);
      if (s.loss == RL_GMPO && !term.high && !term.low) grad += gmpo_grad;
      grad_entropy = -s.entropy_coef * scale;
    }
    io.grad_logprobs[t] = grad;
    if (io.grad_entropy) io.grad_entropy[t] = grad_entropy;
  }
  if (threadIdx.x == 0) sums.x[kSequences] = count > 0.f;
  finish(s, io, sums, gridDim.x);
}

bool needs_sequence(const rl_loss_spec& s) { return s.loss == RL_GSPO || s.loss == RL_GMPO || (s.aggregation == RL_SEQ_MEAN_TOKEN_MEAN); }

int64_t at_least_one(int64_t n) { return n > 0 ? n : 1; }

int64_t token_blocks(int64_t tokens) { return at_least_one(ceil_div(tokens, kTile)); }

int64_t num_blocks(const rl_loss_spec& s, int64_t tokens, int64_t sequences) {
  if (needs_sequence(s)) return at_least_one(sequences);
  const int64_t counting = ceil_div(sequences, kThreads / 32);
  return token_blocks(tokens) + (counting < 32 ? counting : 32);
}

}  // namespace
}  // namespace rl

extern "C" int64_t rl_cuda_policy_loss_partials(const rl_loss_spec* spec, int64_t tokens, int64_t sequences) {
  return rl::num_blocks(*spec, tokens, sequences) * RL_NUM_METRICS;
}

extern "C" int rl_cuda_policy_loss(const rl_loss_spec* spec, const rl_loss_tokens* tokens, const rl_loss_io* io, void* stream) {
  using namespace rl;
  const int64_t blocks = num_blocks(*spec, io->tokens, io->sequences);
  if (needs_sequence(*spec) && io->sequences > 0) return launch(sequence_kernel, blocks, kThreads, stream, *spec, *tokens, *io);
  const int64_t for_tokens = needs_sequence(*spec) ? blocks : token_blocks(io->tokens);
  const bool plain = !tokens->weights && !tokens->ref_logprobs && !io->entropy;
  auto* kernel = spec->loss != RL_PPO ? token_kernel<-1, false> : plain ? token_kernel<RL_PPO, true> : token_kernel<RL_PPO, false>;
  return launch(kernel, blocks, kThreads, stream, *spec, *tokens, *io, unsigned(for_tokens));
}
