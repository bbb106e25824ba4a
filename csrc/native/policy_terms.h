// The policy losses and KL estimators of a token: value, derivative with respect to its log-prob, and what bounded it. One text for
// the CPU's vectors and CUDA's threads; the definition in plain torch, with the papers, is rl_csrc/reference/policy_loss.py.
// Included inside a namespace of each of them, after F (float, or a vector of them), M (what comparing two F gives), RL_TERM (how a
// function is declared), number(float), exp_of(F), log1m_exp(F) = log(max(1 - exp(x), 1e-7)). NaN stays NaN.

constexpr float kLogRatioMax = 20.f;  // a log ratio is clamped here; beyond it the ratio has no gradient

struct Term {
  F loss, grad, ratio;
  M high, low, dual;
};

struct Kl {
  F value, grad;
};

RL_TERM F between(F x, float low, float high) {
  x = x < number(low) ? number(low) : x;
  return x > number(high) ? number(high) : x;
}

// exp of the log ratio, clamped.
RL_TERM F ratio_of(F d) { return exp_of(between(d, -kLogRatioMax, kLogRatioMax)); }

// `rho`, or 0 where the log ratio was clamped.
RL_TERM F ratio_grad(F d, F rho) { return (d > number(kLogRatioMax)) | (d < number(-kLogRatioMax)) ? number(0.f) : rho; }

RL_TERM Term clipped(const rl_loss_spec& s, F rho, F grad, F a) {
  Term t{};
  t.ratio = rho;
  t.high = (a > number(0.f)) & (rho > number(1.f + s.clip_high));
  t.low = (a < number(0.f)) & (rho < number(1.f - s.clip_low));
  F bounded = t.high ? number(1.f + s.clip_high) : rho;
  bounded = t.low ? number(1.f - s.clip_low) : bounded;
  if (s.clip_dual < __builtin_inff()) {
    t.dual = (a < number(0.f)) & (rho > number(s.clip_dual));
    bounded = t.dual ? number(s.clip_dual) : bounded;
  }
  t.loss = -a * bounded;
  t.grad = (t.high | t.low | t.dual) ? number(0.f) : -a * grad;
  return t;
}

// What gmpo bounds, one-sided by the sign of the advantage: its log ratio, not its ratio.
RL_TERM void gmpo_bounds(const rl_loss_spec& s, F d, F a, M* high, M* low) {
  *high = (a > number(0.f)) & (d > number(s.clip_high));
  *low = (a < number(0.f)) & (d < number(-s.clip_low));
}

// `sequence_ratio` is that of the whole sequence (gspo, gmpo); `gmpo_grad` what each token of gmpo that is not bounded moves it by.
template <int LOSS>
RL_TERM Term term_of(const rl_loss_spec& s, F lp, F old, F a, F sequence_ratio, F gmpo_grad) {
  const F d = lp - old;
  if constexpr (LOSS == RL_GSPO) return clipped(s, sequence_ratio, sequence_ratio, a);
  Term t{};
  if constexpr (LOSS == RL_GMPO) {
    gmpo_bounds(s, d, a, &t.high, &t.low);
    t.ratio = sequence_ratio;
    t.loss = -a * sequence_ratio;
    t.grad = (t.high | t.low) ? number(0.f) : gmpo_grad;
    return t;
  }
  const F rho = ratio_of(d);
  t.ratio = rho;
  if constexpr (LOSS == RL_PPO) {
    return clipped(s, rho, ratio_grad(d, rho), a);
  } else if constexpr (LOSS == RL_CISPO) {
    t.high = rho > number(1.f + s.clip_high);
    t.low = rho < number(1.f - s.clip_low);
    t.grad = -between(rho, 1.f - s.clip_low, 1.f + s.clip_high) * a;
    t.loss = t.grad * lp;
  } else if constexpr (LOSS == RL_SAPO) {
    const F tau = a > number(0.f) ? number(s.tau_pos) : number(s.tau_neg);
    const F gate = 1.f / (1.f + exp_of(-between(tau * (rho - 1.f), -80.f, 80.f)));
    t.loss = -a * (4.f / tau) * gate;
    t.grad = -a * 4.f * gate * (1.f - gate) * ratio_grad(d, rho);
  } else if constexpr (LOSS == RL_DPPO_TV || LOSS == RL_DPPO_KL) {
    const F p = exp_of(lp), q = exp_of(old);
    if constexpr (LOSS == RL_DPPO_TV) {
      t.high = p - q > number(s.clip_high);
      t.low = q - p > number(s.clip_low);
    } else {
      const F kl = q * (old - lp) + (1.f - q) * (log1m_exp(old) - log1m_exp(lp));
      t.high = (p > q) & (kl > number(s.clip_high));
      t.low = (p < q) & (kl > number(s.clip_low));
    }
    t.high = t.high & (a > number(0.f));
    t.low = t.low & (a <= number(0.f));
    const F capped = rho > number(s.ratio_max) ? number(s.ratio_max) : rho;
    t.grad = -a * ((t.high | t.low) ? number(0.f) : capped);
    t.loss = t.grad * lp;
  } else if constexpr (LOSS == RL_DRO) {
    t.grad = -(a - s.dro_beta * d);
    t.loss = -(a * lp - 0.5f * s.dro_beta * d * d);
  } else {
    t.grad = -a;
    t.loss = -a * lp;
  }
  return t;
}

RL_TERM Kl kl_of(const rl_loss_spec& s, F d) {
  const F zero = number(0.f);
  if (s.kl == RL_K1) return {d, number(1.f)};
  if (s.kl == RL_K1_PLUS) return {d, d};
  if (s.kl == RL_K2) return {0.5f * d * d, d};
  if (s.kl == RL_KL_ABS) return {d < zero ? -d : d, d > zero ? number(1.f) : (d < zero ? number(-1.f) : zero)};
  if (s.kl == RL_KL_NONE) return {zero, zero};
  const F e = ratio_of(-d), k3 = e - 1.f + d;
  const M is_capped = k3 > number(s.k3_max);  // and has no gradient there
  const F grad = is_capped ? zero : 1.f - ratio_grad(-d, e);
  return {is_capped ? number(s.k3_max) : k3, s.kl == RL_K3 ? grad : d};
}
