// Policy losses, a vector of tokens at a time. Included by level.h. The codes are positions in rl_csrc._types.

enum : int32_t { kPpo, kGspo, kCispo, kSapo, kGmpo, kDppoTv, kDppoKl, kDro, kReinforce };
enum : int32_t { kKlNone, kKl1, kKlAbs, kKl2, kKl3, kKl1Plus, kKl3Plus };
constexpr float kLogRatioMax = 20.0f, kK3Max = 10.0f;

typedef uint8_t vb __attribute__((vector_size(kLanes), aligned(1), may_alias));

struct Tokens {  // one vector of each input; masked-out lanes are 0
  vf lp, old, adv, ref, weight, entropy;
  vi mask;
};

RL_INLINE vf keep(vi mask, vf x) { return (vf)((vi)x & mask); }
RL_INLINE vf clampv(vf x, float low, float high) {
  x = x < splat(low) ? splat(low) : x;
  return x > splat(high) ? splat(high) : x;
}
RL_INLINE vf one_where(vi mask) { return (vf)((vi)splat(1.0f) & mask); }

struct Term {
  vf loss, gradient, ratio;
  vi high, low, dual;
};

RL_INLINE vf log1mexp(vf lp) {
  for (int i = 0; i < kLanes; ++i) {
    const float q = -__builtin_expm1f(lp[i]);
    lp[i] = __builtin_logf(q > 1e-7f ? q : 1e-7f);
  }
  return lp;
}

RL_INLINE void clip(const rl_loss_spec& s, vf rho, vf adv, Term* term) {
  term->high = (adv > 0.0f) & (rho > splat(1 + s.clip_high));
  term->low = (adv < 0.0f) & (rho < splat(1 - s.clip_low));
  vf bounded = term->high ? splat(1 + s.clip_high) : rho;
  bounded = term->low ? splat(1 - s.clip_low) : bounded;
  if (s.has_dual) {
    term->dual = (adv < 0.0f) & (rho > splat(s.clip_dual));
    bounded = term->dual ? splat(s.clip_dual) : bounded;
  }
  term->loss = -adv * bounded;
  term->gradient = keep(~(term->high | term->low | term->dual), -adv * rho);
}

template <int32_t kLoss>
RL_INLINE Term term_of(const rl_loss_spec& s, const Tokens& t, vf d, vf rho, float sequence_ratio, float sequence_gradient) {
  Term term{};
  const vi inside = (d >= -kLogRatioMax) & (d <= kLogRatioMax);
  term.ratio = rho;
  if (kLoss == kPpo) {
    clip(s, rho, t.adv, &term);
    term.gradient = keep(inside, term.gradient);
  } else if (kLoss == kGspo) {
    term.ratio = splat(sequence_ratio);
    clip(s, term.ratio, t.adv, &term);
  } else if (kLoss == kGmpo) {
    term.ratio = splat(sequence_ratio);
    term.high = (t.adv > 0.0f) & (d > splat(s.clip_high));
    term.low = (t.adv < 0.0f) & (d < splat(-s.clip_low));
    term.loss = -t.adv * term.ratio;
    term.gradient = keep(~(term.high | term.low), splat(sequence_gradient));
  } else if (kLoss == kCispo) {
    term.high = rho > splat(1 + s.clip_high);
    term.low = rho < splat(1 - s.clip_low);
    term.gradient = -clampv(rho, 1 - s.clip_low, 1 + s.clip_high) * t.adv;
    term.loss = term.gradient * t.lp;
  } else if (kLoss == kSapo) {
    const vf tau = t.adv > 0.0f ? splat(s.tau_pos) : splat(s.tau_neg);
    const vf x = clampv(tau * (rho - 1.0f), -80.0f, 80.0f);
    const vf sigmoid = 1.0f / (1.0f + expv(-x));
    term.loss = -t.adv * (4.0f / tau) * sigmoid;
    term.gradient = keep(inside, -t.adv * 4.0f * sigmoid * (1.0f - sigmoid) * rho);
  } else if (kLoss == kDppoTv || kLoss == kDppoKl) {
    const vf p = expv(t.lp), q = expv(t.old);
    if (kLoss == kDppoTv) {
      term.high = p - q > splat(s.clip_high);
      term.low = q - p > splat(s.clip_low);
    } else {
      const vf kl = q * (t.old - t.lp) + (1.0f - q) * (log1mexp(t.old) - log1mexp(t.lp));
      term.high = (p > q) & (kl > splat(s.clip_high));
      term.low = (p < q) & (kl > splat(s.clip_low));
    }
    term.high &= t.adv > 0.0f;
    term.low &= t.adv <= 0.0f;
    const vf capped = rho > splat(s.ratio_max) ? splat(s.ratio_max) : rho;
    term.gradient = -t.adv * keep(~(term.high | term.low), capped);
    term.loss = term.gradient * t.lp;
  } else if (kLoss == kDro) {
    term.gradient = -(t.adv - splat(s.dro_beta) * d);
    term.loss = -(t.adv * t.lp - splat(s.dro_beta * 0.5f) * d * d);
  } else {
    term.gradient = -t.adv;
    term.loss = -t.adv * t.lp;
  }
  return term;
}

RL_INLINE vf kl_of(int32_t kind, vf d, vf* gradient) {
  const vf k2 = d * d * 0.5f;
  *gradient = d;
  if (kind == kKl2) return k2;
  if (kind == kKl1Plus) return d;
  if (kind == kKl1) {
    *gradient = splat(1.0f);
    return d;
  }
  if (kind == kKlAbs) {
    *gradient = one_where(d > 0.0f) - one_where(d < 0.0f);
    return (vf)((vi)d & splat_int(0x7fffffff));
  }
  const vf e = expv(clampv(-d, -kLogRatioMax, kLogRatioMax)), k3 = e - 1.0f + d;
  const vi is_capped = k3 > splat(kK3Max);
  if (kind == kKl3) *gradient = keep(~is_capped, 1.0f - e);
  return is_capped ? splat(kK3Max) : k3;
}

RL_INLINE vf load_optional(const float* p, int64_t i, vi mask) { return p ? keep(mask, load(p + i)) : vf{}; }

// One vector of tokens; adds to the twelve sums (without num_sequences) and returns the gradient of the logprobs.
template <int32_t kLoss>
RL_INLINE vf policy_vector(const rl_policy_batch& b, const rl_loss_spec& s, int64_t i, float scale, float ratio, float extra, vf* sums) {
  Tokens t;
  t.mask = __builtin_convertvector(*reinterpret_cast<const vb*>(b.mask + i), vi) != 0;
  t.lp = keep(t.mask, load(b.logprobs + i));
  t.old = keep(t.mask, load(b.old_logprobs + i));
  t.adv = keep(t.mask, load(b.advantages + i));
  const vf d = t.lp - t.old;
  const vf rho = expv(clampv(d, -kLogRatioMax, kLogRatioMax));
  Term term = term_of<kLoss>(s, t, d, rho, ratio, extra);
  vf gradient = term.gradient, loss = term.loss;
  if (b.weights) {
    const vf w = load_optional(b.weights, i, t.mask);
    loss *= w;
    if (kLoss != kGmpo) gradient *= w;  // gmpo's sequence sum holds them
  }
  if (s.kl != kKlNone && b.ref_logprobs) {
    vf kl_gradient;
    const vf kl = kl_of(s.kl, t.lp - load_optional(b.ref_logprobs, i, t.mask), &kl_gradient);
    sums[1] += keep(t.mask, kl);
    gradient += splat(s.kl_coef) * kl_gradient;
  }
  sums[0] += keep(t.mask, loss);
  sums[2] += load_optional(b.entropy, i, t.mask);
  sums[3] += one_where(t.mask);
  sums[5] += d;
  sums[6] += keep(t.mask, rho - 1.0f - d);
  sums[7] += one_where(term.high & t.mask);
  sums[8] += one_where(term.low & t.mask);
  sums[9] += one_where(term.dual & t.mask);
  sums[10] += keep(t.mask, term.ratio);
  sums[11] += keep(t.mask, term.ratio * term.ratio);
  return keep(t.mask, gradient * splat(scale));
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
    case kPpo: return policy_run<kPpo>(b, s, begin, end, scale, ratio, extra, sums, grad);
    case kGspo: return policy_run<kGspo>(b, s, begin, end, scale, ratio, extra, sums, grad);
    case kCispo: return policy_run<kCispo>(b, s, begin, end, scale, ratio, extra, sums, grad);
    case kSapo: return policy_run<kSapo>(b, s, begin, end, scale, ratio, extra, sums, grad);
    case kGmpo: return policy_run<kGmpo>(b, s, begin, end, scale, ratio, extra, sums, grad);
    case kDppoTv: return policy_run<kDppoTv>(b, s, begin, end, scale, ratio, extra, sums, grad);
    case kDppoKl: return policy_run<kDppoKl>(b, s, begin, end, scale, ratio, extra, sums, grad);
    case kDro: return policy_run<kDro>(b, s, begin, end, scale, ratio, extra, sums, grad);
    default: return policy_run<kReinforce>(b, s, begin, end, scale, ratio, extra, sums, grad);
  }
}
