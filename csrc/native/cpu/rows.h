// What the softmax kernels share about one scored row.
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/levels.h"

namespace rl {

// A row's results. As made: what an ignored label gives.
struct Scored {
  float logprobs = 0, entropy = 0, sum_pi_squared = 0;
  float lse = 0, lse2 = 0;  // natural, and in units of log 2
  bool live = false;        // false: ignored, or every logit is -inf
};

std::int64_t rows_per_piece(const rl_logits& in);
float inverse_temperature(const rl_logits& in, std::int64_t i);
bool is_ignored(const rl_logits& in, std::int64_t i);
std::int64_t row_of(const rl_logits& in, std::int64_t i);
std::int64_t local_label(const rl_logits& in, std::int64_t i);  // -1: not in this shard
std::int64_t first_bad_label(const rl_logits& in);              // 1 + its position; 0: none
Scored score(const RowStats& r);
void put(const rl_logprobs_out& out, std::int64_t i, const Scored& s);
RowGradient row_gradient(const Scored& s, float inverse_temperature, float g, float entropy_g);
void clear_row(const rl_logits& in, void* out);
void* gradient_row(const rl_logits& in, void* grad, std::int64_t stride, std::int64_t row);

}  // namespace rl
