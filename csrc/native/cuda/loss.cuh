// The per-token policy losses: value, derivative with respect to the token's log-prob, and what is counted. The formulas are those
// of rl_csrc/reference/_policy.py, whose docstrings name the papers.
#pragma once
#include "common.cuh"
#include "rl_csrc/kernels_cuda.h"

namespace rl {

constexpr float kLogRatioMax = 20.f, kK3Max = 10.f;

struct Term {
  float loss, grad, ratio;
  bool high, low, dual;
};

struct Ratio {
  float value, grad;  // exp of the clamped log ratio, and its derivative: 0 beyond the clamp
};

// Without branches, so that what asks for the same ratio twice computes it once. NaN stays NaN.
__device__ __forceinline__ Ratio ratio_of(float d) {
  const float clamped = d > kLogRatioMax ? kLogRatioMax : d < -kLogRatioMax ? -kLogRatioMax : d;
  const float value = expf(clamped);
  return {value, d == clamped ? value : 0.f};
}

__device__ __forceinline__ float log1m_exp(float lp) { return logf(fmaxf(-expm1f(lp), 1e-7f)); }

__device__ __forceinline__ Term clipped(const rl_loss_spec& s, float rho, float grad, float a) {
  Term t{0.f, 0.f, rho, a > 0.f && rho > 1.f + s.clip_high, a < 0.f && rho < 1.f - s.clip_low, false};
  float bounded = t.high ? 1.f + s.clip_high : t.low ? 1.f - s.clip_low : rho;
  if (s.has_dual) {
    t.dual = a < 0.f && rho > s.clip_dual;
    if (t.dual) bounded = s.clip_dual;
  }
  t.loss = -a * bounded;
  t.grad = t.high || t.low || t.dual ? 0.f : -a * grad;
  return t;
}

__device__ __forceinline__ Term dppo(const rl_loss_spec& s, float lp, float old, float a) {
  const float rho = ratio_of(lp - old).value, p = expf(lp), q = expf(old);
  bool high, low;
  if (s.loss == RL_DPPO_TV) {
    high = p - q > s.clip_high;
    low = q - p > s.clip_low;
  } else {
    const float kl = q * (old - lp) + (1.f - q) * (log1m_exp(old) - log1m_exp(lp));
    high = p > q && kl > s.clip_high;
    low = p < q && kl > s.clip_low;
  }
  high = high && a > 0.f;
  low = low && a <= 0.f;
  const float kept = high || low ? 0.f : fminf(rho, s.ratio_max);
  return {-a * kept * lp, -a * kept, rho, high, low, false};
}

// What gmpo averages over a sequence: the log ratio, one-sided bounded by the sign of the advantage.
__device__ __forceinline__ float gmpo_bound(const rl_loss_spec& s, float d, float a, bool& high, bool& low) {
  high = a > 0.f && d > s.clip_high;
  low = a < 0.f && d < -s.clip_low;
  return high ? s.clip_high : low ? -s.clip_low : d;
}

// A token of a loss that needs nothing of its neighbours. `sequence` is the mean that gspo takes its ratio from.
__device__ __forceinline__ Term token_term(const rl_loss_spec& s, float lp, float old, float a, float sequence) {
  const float d = lp - old;
  switch (s.loss) {
    case RL_PPO: {
      const Ratio r = ratio_of(d);
      return clipped(s, r.value, r.grad, a);
    }
    case RL_GSPO: {
      const float rho = ratio_of(sequence).value;
      return clipped(s, rho, rho, a);
    }
    case RL_CISPO: {
      const float rho = ratio_of(d).value;
      const float bounded = fminf(fmaxf(rho, 1.f - s.clip_low), 1.f + s.clip_high);
      return {-bounded * a * lp, -bounded * a, rho, rho > 1.f + s.clip_high, rho < 1.f - s.clip_low, false};
    }
    case RL_SAPO: {
      const Ratio r = ratio_of(d);
      const float tau = a > 0.f ? s.tau_pos : s.tau_neg;
      const float gate = 1.f / (1.f + expf(-tau * (r.value - 1.f)));
      return {-a * (4.f / tau) * gate, -a * 4.f * gate * (1.f - gate) * r.grad, r.value, false, false, false};
    }
    case RL_DPPO_TV:
    case RL_DPPO_KL: return dppo(s, lp, old, a);
    case RL_DRO: return {-(a * lp - 0.5f * s.dro_beta * d * d), -(a - s.dro_beta * d), ratio_of(d).value, false, false, false};
    default: return {-a * lp, -a, ratio_of(d).value, false, false, false};
  }
}

struct Kl {
  float value, grad;
};

// Capped, without a gradient beyond the cap. NaN stays NaN.
__device__ __forceinline__ Kl k3_of(float d) {
  const float e = ratio_of(-d).value, k3 = e - 1.f + d;
  return k3 > kK3Max ? Kl{kK3Max, 0.f} : Kl{k3, 1.f - e};
}

__device__ __forceinline__ Kl kl_term(int kind, float d) {
  switch (kind) {
    case RL_K1: return {d, 1.f};
    case RL_KL_ABS: return {fabsf(d), d > 0.f ? 1.f : d < 0.f ? -1.f : 0.f};
    case RL_K2: return {0.5f * d * d, d};
    case RL_K3: return k3_of(d);
    case RL_K1_PLUS: return {d, d};
    case RL_K3_PLUS: return {k3_of(d).value, d};
    default: return {0.f, 0.f};
  }
}

__device__ __forceinline__ float denominator_of(const rl_loss_tokens& t) {
  return t.denominator ? *t.denominator : t.scalar_denominator;
}

}  // namespace rl
