// What every instruction-set level provides, as plain function pointers over plain structs.
#pragma once
#include <cstdint>

#include "rl_csrc/kernels.h"

namespace rl {

// Forward statistics of one row, before they become log-probs. Scaled logits in units of log 2.
struct RowStats {
  float top;        // maximum, -1e30 or less: every logit is -inf
  float target;     // the label's scaled logit; -inf: not in this shard
  double sum, dot, square;  // of e = 2^(z - top): e, e * (z - top), e^2
};

// Per-row factors of the gradient: p * (a + b * log2 p) on every column, and `at_target` on the label's.
struct RowGradient {
  float lse2;  // log-sum-exp in units of log 2
  float a, b;
  float at_target;
};

// Sums of one run of tokens of a policy loss, in the order of METRIC_NAMES.
struct PolicySums {
  double values[RL_NUM_METRICS];
};

struct Level {
  // The row `row` of `in` (already resolved by row_index), scaled by `inverse_temperature`; label local to the shard or -1.
  void (*row_stats)(const rl_logits* in, int64_t row, float inverse_temperature, int64_t label, bool wants_dot, bool wants_square,
                    RowStats* out);
  void (*row_gradient)(const rl_logits* in, int64_t row, float inverse_temperature, int64_t label, const RowGradient* g, void* out);
  // Tokens [begin, end) of one sequence: adds to sums (not yet scaled), writes gradients times `scale`. `ratio` is the
  // sequence's (gspo, gmpo); `extra` the gradient that every unclipped token of a gmpo sequence gets.
  void (*policy_tokens)(const rl_policy_batch* batch, const rl_loss_spec* spec, int64_t begin, int64_t end, float scale, float ratio,
                        float extra, PolicySums* sums, float* grad);
  // Of a row of float32 logits, scaled by `factor` (log2(e) / temperature) and with the maximum `top`: the first token up to which
  // the exponentials sum to more than `threshold`, and the most likely one.
  int64_t (*row_pick)(const float* logits, int64_t vocab, float factor, float top, double threshold);
  int64_t (*row_top)(const float* logits, int64_t vocab, float factor, float top);
};

const Level& level_baseline();
const Level& level_avx2();
const Level& level_avx512();
const Level& level_bf16();

const Level& level();  // the one in force

}  // namespace rl
