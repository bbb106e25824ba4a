// Policy losses over packed sequences, alone and straight from logits.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/levels.h"
#include "cpu/pool.h"
#include "cpu/rows.h"

namespace rl {
namespace {

enum Aggregation : std::int32_t { kTokenMean, kTokenSum, kSeqMeanTokenSum, kSeqMeanTokenMean, kSeqMeanTokenSumNorm };
constexpr std::int32_t kGspo = 1, kGmpo = 4;  // positions in LOSSES
constexpr double kLogRatioMax = 20;
constexpr std::int64_t kPieceTokens = 8192;

struct Run {
  float scale = 0;  // of every token's loss
  float ratio = 1;  // the sequence's (gspo, gmpo)
  float extra = 0;  // gmpo: gradient of each unclipped token, before scale
};

std::int64_t count_masked(const rl_policy_batch& b, std::int64_t begin, std::int64_t end) {
  std::int64_t count = 0;
  for (std::int64_t i = begin; i < end; ++i) count += b.mask[i] != 0;
  return count;
}

double bounded_log_ratio(const rl_policy_batch& b, const rl_loss_spec& s, std::int64_t i) {
  const double d = static_cast<double>(b.logprobs[i]) - b.old_logprobs[i];
  if (s.loss != kGmpo) return d;
  if (b.advantages[i] > 0) return std::min<double>(d, s.clip_high);
  if (b.advantages[i] < 0) return std::max<double>(d, -s.clip_low);
  return d;
}

Run sequence_run(const rl_policy_batch& b, const rl_loss_spec& s, std::int64_t sequence, std::int64_t count) {
  const std::int64_t begin = b.cu_seqlens[sequence], end = b.cu_seqlens[sequence + 1];
  Run run;
  if (b.denominators)
    run.scale = 1 / b.denominators[sequence];
  else
    run.scale = static_cast<float>(1 / b.denominator / (s.aggregation == kSeqMeanTokenMean ? std::max<std::int64_t>(count, 1) : 1));
  if (s.loss != kGspo && s.loss != kGmpo) return run;
  double sum = 0, advantage = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    if (!b.mask[i]) continue;
    sum += bounded_log_ratio(b, s, i);
    advantage += static_cast<double>(b.advantages[i]) * (b.weights ? b.weights[i] : 1);
  }
  const double mean = sum / std::max<std::int64_t>(count, 1);
  run.ratio = static_cast<float>(std::exp(std::clamp(mean, -kLogRatioMax, kLogRatioMax)));
  if (std::abs(mean) <= kLogRatioMax) run.extra = static_cast<float>(-advantage * run.ratio / std::max<std::int64_t>(count, 1));
  return run;
}

bool wants_count(const rl_loss_spec& s) { return s.aggregation == kSeqMeanTokenMean || s.loss == kGspo || s.loss == kGmpo; }

}  // namespace

void policy_sequence(const rl_policy_batch& b, const rl_loss_spec& s, std::int64_t sequence, PolicySums* sums, float* grad,
                     float* grad_entropy) {
  const std::int64_t begin = b.cu_seqlens[sequence], end = b.cu_seqlens[sequence + 1];
  const Run run = sequence_run(b, s, sequence, wants_count(s) ? count_masked(b, begin, end) : 0);
  level().policy_tokens(&b, &s, begin, end, run.scale, run.ratio, run.extra, sums, grad);
  for (int k = 0; k < 3; ++k) sums->values[k] *= run.scale;
  sums->values[4] = sums->values[3] > 0;
  if (!grad_entropy) return;
  for (std::int64_t i = begin; i < end; ++i) grad_entropy[i] = b.mask[i] ? -s.entropy_coef * run.scale : 0;
}

namespace {

// Sequences are summed in order whatever thread ran them.
void finish(const std::vector<PolicySums>& parts, const rl_loss_spec& s, float* loss, float* metrics) {
  PolicySums total{};
  for (const PolicySums& part : parts)
    for (int k = 0; k < RL_NUM_METRICS; ++k) total.values[k] += part.values[k];
  *loss = static_cast<float>(total.values[0] + s.kl_coef * total.values[1] - s.entropy_coef * total.values[2]);
  for (int k = 0; k < RL_NUM_METRICS; ++k) metrics[k] = static_cast<float>(total.values[k]);
}

}  // namespace
}  // namespace rl

using namespace rl;

extern "C" void rl_cpu_policy_loss(const rl_policy_batch* batch, const rl_loss_spec* spec, float* loss, float* metrics,
                                   float* grad_logprobs, float* grad_entropy, int threads) {
  std::vector<PolicySums> parts(static_cast<std::size_t>(batch->sequences), PolicySums{});
  const int64_t mean_length = batch->sequences ? batch->tokens / batch->sequences + 1 : 1;
  parallel_for(batch->sequences, kPieceTokens / mean_length + 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k)
      policy_sequence(*batch, *spec, k, &parts[static_cast<std::size_t>(k)], grad_logprobs, grad_entropy);
  });
  finish(parts, *spec, loss, metrics);
}

namespace {

// The gradient of one token's loss with respect to its log-prob, by the same code that does whole runs.
float token_gradient(const rl_policy_batch& b, const rl_loss_spec& s, int64_t i, float logprob, float scale) {
  rl_policy_batch one = b;
  one.logprobs = &logprob;
  one.old_logprobs += i, one.advantages += i, one.mask += i;
  one.ref_logprobs = b.ref_logprobs ? b.ref_logprobs + i : nullptr;
  one.weights = b.weights ? b.weights + i : nullptr;
  one.entropy = nullptr;
  PolicySums unused{};
  float gradient = 0;
  level().policy_tokens(&one, &s, 0, 1, scale, 1, 0, &unused, &gradient);
  return gradient;
}

std::vector<float> token_scales(const rl_policy_batch& b, const rl_loss_spec& s) {
  std::vector<float> scales(static_cast<std::size_t>(b.tokens), static_cast<float>(1 / b.denominator));
  if (s.aggregation != kSeqMeanTokenMean) return scales;
  for (int64_t k = 0; k < b.sequences; ++k) {
    const int64_t begin = b.cu_seqlens[k], end = b.cu_seqlens[k + 1];
    const double count = static_cast<double>(std::max<int64_t>(count_masked(b, begin, end), 1));
    std::fill(scales.begin() + begin, scales.begin() + end, static_cast<float>(1 / b.denominator / count));
  }
  return scales;
}

}  // namespace

extern "C" int64_t rl_cpu_policy_loss_from_logits(const rl_logits* in, const rl_policy_batch* batch, const rl_loss_spec* spec,
                                                  float* logprobs, float* entropy, void* grad_logits, int64_t grad_stride, float* loss,
                                                  float* metrics, int threads) {
  if (const int64_t bad = first_bad_label(*in)) return bad;
  const Level& kernels = level();
  const std::vector<float> scales = token_scales(*batch, *spec);
  const rl_logprobs_out out{logprobs, entropy, nullptr, nullptr};
  parallel_for(in->rows, rows_per_piece(*in), threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = row_of(*in, i);
      void* grad_row = grad_logits ? gradient_row(*in, grad_logits, grad_stride, row) : nullptr;
      Scored s;
      if (!is_ignored(*in, i)) {
        RowStats r;
        kernels.row_stats(in, row, inverse_temperature(*in, i), local_label(*in, i), entropy != nullptr, false, &r);
        s = score(r);
      }
      put(out, i, s);
      if (!grad_row) continue;
      if (!s.live || !batch->mask[i]) {
        clear_row(*in, grad_row);
        continue;
      }
      const float scale = scales[static_cast<std::size_t>(i)];
      const float it = inverse_temperature(*in, i);
      const RowGradient g = row_gradient(s, it, token_gradient(*batch, *spec, i, s.logprobs, scale),
                                         entropy ? -spec->entropy_coef * scale : 0);
      kernels.row_gradient(in, row, it, local_label(*in, i), &g, grad_row);
    }
  });
  std::vector<float> unused(static_cast<std::size_t>(batch->tokens));
  rl_policy_batch scored = *batch;
  scored.logprobs = logprobs;
  scored.entropy = entropy;
  rl_cpu_policy_loss(&scored, spec, loss, metrics, unused.data(), nullptr, threads);
  return 0;
}
