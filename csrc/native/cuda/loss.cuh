// The per-token policy losses on CUDA.
#pragma once
#include "common.cuh"
#include "rl_csrc/kernels_cuda.h"

namespace rl {

typedef float F;
typedef bool M;
__device__ __forceinline__ F number(float x) { return x; }
__device__ __forceinline__ F exp_of(F x) { return expf(x); }
__device__ __forceinline__ F log1m_exp(F lp) { return logf(fmaxf(-expm1f(lp), 1e-7f)); }
#define RL_TERM __device__ __forceinline__
#include "policy_terms.h"
#undef RL_TERM

// A token of a loss that is known when it runs; gmpo's gradient is the sequence's to add.
__device__ __forceinline__ Term token_term(const rl_loss_spec& s, float lp, float old, float a, float sequence_ratio) {
  switch (s.loss) {
    case RL_PPO: return term_of<RL_PPO>(s, lp, old, a, sequence_ratio, 0.f);
    case RL_GSPO: return term_of<RL_GSPO>(s, lp, old, a, sequence_ratio, 0.f);
    case RL_CISPO: return term_of<RL_CISPO>(s, lp, old, a, sequence_ratio, 0.f);
    case RL_SAPO: return term_of<RL_SAPO>(s, lp, old, a, sequence_ratio, 0.f);
    case RL_GMPO: return term_of<RL_GMPO>(s, lp, old, a, sequence_ratio, 0.f);
    case RL_DPPO_TV: return term_of<RL_DPPO_TV>(s, lp, old, a, sequence_ratio, 0.f);
    case RL_DPPO_KL: return term_of<RL_DPPO_KL>(s, lp, old, a, sequence_ratio, 0.f);
    case RL_DRO: return term_of<RL_DRO>(s, lp, old, a, sequence_ratio, 0.f);
    default: return term_of<RL_REINFORCE>(s, lp, old, a, sequence_ratio, 0.f);
  }
}

__device__ __forceinline__ float denominator_of(const rl_loss_tokens& t) {
  return t.denominator ? *t.denominator : t.scalar_denominator;
}

}  // namespace rl
