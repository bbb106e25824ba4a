// Policy losses, a vector of tokens at a time. Included by level.h.

RL_INLINE vf keep(vi mask, vf x) { return (vf)((vi)x & mask); }
RL_INLINE vf one_where(vi mask) { return (vf)((vi)splat(1.0f) & mask); }

typedef vf F;
typedef vi M;
RL_INLINE F number(float x) { return splat(x); }
RL_INLINE F exp_of(F x) { return expv(x); }
RL_INLINE F log1m_exp(F lp) {
  for (int i = 0; i < kLanes; ++i) {
    const float q = -__builtin_expm1f(lp[i]);
    lp[i] = __builtin_logf(q > 1e-7f ? q : 1e-7f);
  }
  return lp;
}
#define RL_TERM RL_INLINE
#include "policy_terms.h"
#undef RL_TERM

RL_INLINE vf load_optional(const float* p, int64_t i, vi mask) { return p ? keep(mask, load(p + i)) : vf{}; }

// One vector of tokens; adds to the twelve sums (without num_sequences) and returns the gradient of the logprobs.
template <int32_t kLoss>
RL_INLINE vf policy_vector(const rl_policy_batch& b, const rl_loss_spec& s, int64_t i, float scale, float ratio, float extra, vf* sums) {
  const vi mask = widen(b.mask + i) != 0;
  const vf lp = keep(mask, load(b.logprobs + i)), old = keep(mask, load(b.old_logprobs + i));
  const vf d = lp - old;
  const Term term = term_of<kLoss>(s, lp, old, keep(mask, load(b.advantages + i)), splat(ratio), splat(extra));
  vf gradient = term.grad, loss = term.loss;
  if (b.weights) {
    const vf w = load_optional(b.weights, i, mask);
    loss *= w;
    if (kLoss != RL_GMPO) gradient *= w;  // gmpo's sequence sum holds them
  }
  if (s.kl != RL_KL_NONE && b.ref_logprobs) {
    const Kl kl = kl_of(s, lp - load_optional(b.ref_logprobs, i, mask));
    sums[1] += keep(mask, kl.value);
    gradient += splat(s.kl_coef) * kl.grad;
  }
  sums[0] += keep(mask, loss);
  sums[2] += load_optional(b.entropy, i, mask);
  sums[3] += one_where(mask);
  sums[5] += d;
  sums[6] += keep(mask, ratio_of(d) - 1.0f - d);
  sums[7] += one_where(term.high & mask);
  sums[8] += one_where(term.low & mask);
  sums[9] += one_where(term.dual & mask);
  sums[10] += keep(mask, term.ratio);
  sums[11] += keep(mask, term.ratio * term.ratio);
  return keep(mask, gradient * splat(scale));
}

// The last, short vector of a run: its inputs copied to the stack behind a mask of zeros.
struct Tail {
  float values[6][kLanes];
  uint8_t mask[kLanes];
  rl_policy_batch batch;

  Tail(const rl_policy_batch& b, int64_t begin, int64_t n) : batch(b) {
    const float** slots[6] = {&batch.logprobs, &batch.old_logprobs, &batch.advantages, &batch.ref_logprobs, &batch.weights, &batch.entropy};
    for (int k = 0; k < 6; ++k) {
      if (!*slots[k]) continue;
      for (int64_t j = 0; j < kLanes; ++j) values[k][j] = j < n ? (*slots[k])[begin + j] : 0.0f;
      *slots[k] = values[k];
    }
    for (int64_t j = 0; j < kLanes; ++j) mask[j] = j < n ? b.mask[begin + j] : 0;
    batch.mask = mask;
  }
};

RL_INLINE void add_sums(const vf* sums, PolicySums* out) {
  for (int k = 0; k < RL_NUM_METRICS; ++k) out->values[k] += sum_lanes(sums[k]);
}

template <int32_t kLoss>
void policy_run(const rl_policy_batch* b, const rl_loss_spec* s, int64_t begin, int64_t end, float scale, float ratio, float extra,
                PolicySums* out, float* grad) {
  constexpr int64_t kBlock = 64 * kLanes;  // float32 sums stay short; the long ones are float64
  int64_t i = begin;
  while (i + kLanes <= end) {
    vf sums[RL_NUM_METRICS] = {};
    const int64_t stop = end - i < kBlock ? i + (end - i) / kLanes * kLanes : i + kBlock;
    for (; i < stop; i += kLanes) store(grad + i, policy_vector<kLoss>(*b, *s, i, scale, ratio, extra, sums));
    add_sums(sums, out);
  }
  if (i == end) return;
  vf sums[RL_NUM_METRICS] = {};
  const Tail tail(*b, i, end - i);
  const vf g = policy_vector<kLoss>(tail.batch, *s, 0, scale, ratio, extra, sums);
  for (int64_t j = i; j < end; ++j) grad[j] = g[j - i];
  add_sums(sums, out);
}

void policy_tokens(const rl_policy_batch* b, const rl_loss_spec* s, int64_t begin, int64_t end, float scale, float ratio, float extra,
                   PolicySums* sums, float* grad) {
  switch (s->loss) {
    case RL_PPO: return policy_run<RL_PPO>(b, s, begin, end, scale, ratio, extra, sums, grad);
    case RL_GSPO: return policy_run<RL_GSPO>(b, s, begin, end, scale, ratio, extra, sums, grad);
    case RL_CISPO: return policy_run<RL_CISPO>(b, s, begin, end, scale, ratio, extra, sums, grad);
    case RL_SAPO: return policy_run<RL_SAPO>(b, s, begin, end, scale, ratio, extra, sums, grad);
    case RL_GMPO: return policy_run<RL_GMPO>(b, s, begin, end, scale, ratio, extra, sums, grad);
    case RL_DPPO_TV: return policy_run<RL_DPPO_TV>(b, s, begin, end, scale, ratio, extra, sums, grad);
    case RL_DPPO_KL: return policy_run<RL_DPPO_KL>(b, s, begin, end, scale, ratio, extra, sums, grad);
    case RL_DRO: return policy_run<RL_DRO>(b, s, begin, end, scale, ratio, extra, sums, grad);
    default: return policy_run<RL_REINFORCE>(b, s, begin, end, scale, ratio, extra, sums, grad);
  }
}
