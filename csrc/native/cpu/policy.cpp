// Policy losses over packed sequences.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/levels.h"
#include "cpu/pool.h"
#include "cpu/rows.h"

namespace rl {
namespace {

constexpr double kLogRatioMax = 20;  // as in policy_terms.h
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
  if (s.loss != RL_GMPO) return d;
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
    run.scale = static_cast<float>(1 / b.denominator / (s.aggregation == RL_SEQ_MEAN_TOKEN_MEAN ? std::max<std::int64_t>(count, 1) : 1));
  if (s.loss != RL_GSPO && s.loss != RL_GMPO) return run;
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

bool wants_count(const rl_loss_spec& s) { return s.aggregation == RL_SEQ_MEAN_TOKEN_MEAN || s.loss == RL_GSPO || s.loss == RL_GMPO; }

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
