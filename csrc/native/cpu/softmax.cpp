// Log-probs over rows of logits: what is done with a row's statistics. The rows themselves are the levels' work.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/levels.h"
#include "cpu/pool.h"
#include "cpu/rows.h"

namespace rl {
namespace {

constexpr double kLn2 = 0.6931471805599453;
constexpr float kDead = -1e30f;
constexpr float kInf = std::numeric_limits<float>::infinity();

bool needs_dot(const rl_logprobs_out& out) { return out.entropy != nullptr; }

}  // namespace

std::int64_t rows_per_piece(const rl_logits& in) {
  constexpr std::int64_t kPieceElements = 1 << 16;
  return std::max<std::int64_t>(1, kPieceElements / std::max<std::int64_t>(in.vocab, 1));
}

float inverse_temperature(const rl_logits& in, std::int64_t i) {
  return 1.0f / (in.temperature ? in.temperature[i] : in.scalar_temperature);
}

bool is_ignored(const rl_logits& in, std::int64_t i) { return in.has_ignore && in.labels[i] == in.ignore_index; }

std::int64_t row_of(const rl_logits& in, std::int64_t i) { return in.row_index ? in.row_index[i] : i; }

std::int64_t local_label(const rl_logits& in, std::int64_t i) {
  const std::int64_t label = in.labels[i] - in.vocab_start;
  return label >= 0 && label < in.vocab ? label : -1;
}

std::int64_t first_bad_label(const rl_logits& in) {
  for (std::int64_t i = 0; i < in.rows; ++i)
    if (!is_ignored(in, i) && local_label(in, i) < 0) return 1 + i;
  return 0;
}

Scored score(const RowStats& r) {
  Scored s;
  if (r.top <= kDead) {
    s.logprobs = s.lse = -kInf;
    return s;
  }
  const double log_sum = std::log(r.sum);
  s.live = true;
  s.logprobs = static_cast<float>((static_cast<double>(r.target) - r.top) * kLn2 - log_sum);
  if (r.target <= kDead) s.logprobs = -kInf;
  s.lse = static_cast<float>(r.top * kLn2 + log_sum);
  s.lse2 = static_cast<float>(r.top + log_sum / kLn2);
  s.entropy = static_cast<float>(log_sum - kLn2 * (r.dot / r.sum));
  s.sum_pi_squared = static_cast<float>(r.square / (r.sum * r.sum));
  return s;
}

void put(const rl_logprobs_out& out, std::int64_t i, const Scored& s) {
  if (out.logprobs) out.logprobs[i] = s.logprobs;
  if (out.entropy) out.entropy[i] = s.entropy;
  if (out.sum_pi_squared) out.sum_pi_squared[i] = s.sum_pi_squared;
  if (out.lse) out.lse[i] = s.lse;
}

RowGradient row_gradient(const Scored& s, float inverse_temperature, float g, float entropy_g) {
  RowGradient r;
  r.lse2 = s.lse2;
  r.a = -(g + entropy_g * s.entropy) * inverse_temperature;
  r.b = static_cast<float>(-entropy_g * kLn2) * inverse_temperature;
  const float entropy_term = entropy_g == 0 || s.logprobs == -kInf ? 0 : entropy_g * std::exp(s.logprobs) * (s.logprobs + s.entropy);
  r.at_target = -(g * std::expm1(s.logprobs) + entropy_term) * inverse_temperature;
  return r;
}

std::int64_t element_size(const rl_logits& in) { return in.dtype == RL_F32 ? 4 : 2; }

void clear_row(const rl_logits& in, void* out) { std::memset(out, 0, static_cast<std::size_t>(in.vocab * element_size(in))); }

void* gradient_row(const rl_logits& in, void* grad, std::int64_t stride, std::int64_t row) {
  return static_cast<char*>(grad) + row * stride * element_size(in);
}

}  // namespace rl

using namespace rl;

extern "C" int64_t rl_cpu_logprobs(const rl_logits* in, const rl_logprobs_out* out, int threads) {
  if (const int64_t bad = first_bad_label(*in)) return bad;
  const Level& kernels = level();
  parallel_for(in->rows, rows_per_piece(*in), threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (is_ignored(*in, i)) {
        put(*out, i, Scored{});
        continue;
      }
      RowStats r;
      kernels.row_stats(in, row_of(*in, i), inverse_temperature(*in, i), local_label(*in, i), needs_dot(*out),
                        out->sum_pi_squared != nullptr, &r);
      put(*out, i, score(r));
    }
  });
  return 0;
}

extern "C" int64_t rl_cpu_logprobs_backward(const rl_logits* in, const rl_logprobs_grad* grad, int threads) {
  const Level& kernels = level();
  parallel_for(in->rows, rows_per_piece(*in), threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = row_of(*in, i);
      void* out = gradient_row(*in, grad->grad_logits, grad->grad_stride, row);
      const float g = grad->grad_logprobs ? grad->grad_logprobs[i] : 0;
      const float entropy_g = grad->grad_entropy ? grad->grad_entropy[i] : 0;
      const bool dead = grad->lse[i] == -kInf;
      if (is_ignored(*in, i) || dead || (g == 0 && entropy_g == 0)) {
        clear_row(*in, out);
        continue;
      }
      Scored s;
      s.logprobs = grad->logprobs[i];
      s.entropy = grad->entropy ? grad->entropy[i] : 0;
      s.lse2 = static_cast<float>(grad->lse[i] / kLn2);
      const float it = inverse_temperature(*in, i);
      const RowGradient r = row_gradient(s, it, g, entropy_g);
      kernels.row_gradient(in, row, it, local_label(*in, i), &r, out);
    }
  });
  return 0;
}

extern "C" int64_t rl_cpu_logprobs_with_grad(const rl_logits* in, const rl_logprobs_out* out, const rl_logprobs_grad* grad,
                                             int threads) {
  if (const int64_t bad = first_bad_label(*in)) return bad;
  const Level& kernels = level();
  parallel_for(in->rows, rows_per_piece(*in), threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = row_of(*in, i);
      void* grad_row = gradient_row(*in, grad->grad_logits, grad->grad_stride, row);
      if (is_ignored(*in, i)) {
        put(*out, i, Scored{});
        clear_row(*in, grad_row);
        continue;
      }
      const float entropy_g = grad->grad_entropy ? grad->grad_entropy[i] : 0;
      const float it = inverse_temperature(*in, i);
      RowStats r;
      kernels.row_stats(in, row, it, local_label(*in, i), needs_dot(*out) || entropy_g != 0, out->sum_pi_squared != nullptr, &r);
      const Scored s = score(r);
      put(*out, i, s);
      if (!s.live) {
        clear_row(*in, grad_row);
        continue;
      }
      const RowGradient g = row_gradient(s, it, grad->grad_logprobs ? grad->grad_logprobs[i] : 0, entropy_g);
      kernels.row_gradient(in, row, it, local_label(*in, i), &g, grad_row);
    }
  });
  return 0;
}

extern "C" int64_t rl_cpu_logprob_stats(const rl_logits* in, float* stats, int threads) {
  const Level& kernels = level();
  parallel_for(in->rows, rows_per_piece(*in), threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* s = stats + i * RL_NUM_STATS;
      if (is_ignored(*in, i)) {
        const float blank[RL_NUM_STATS] = {-kInf, 0, 0, 0, kInf};
        std::copy(blank, blank + RL_NUM_STATS, s);
        continue;
      }
      RowStats r;
      kernels.row_stats(in, row_of(*in, i), inverse_temperature(*in, i), local_label(*in, i), true, true, &r);
      const bool dead = r.top <= kDead;
      s[0] = dead ? -kInf : static_cast<float>(r.top * kLn2);
      s[1] = dead ? 0 : static_cast<float>(r.sum);
      s[2] = dead ? 0 : static_cast<float>(r.dot * kLn2);
      s[3] = dead ? 0 : static_cast<float>(r.square);
      s[4] = r.target <= kDead ? -kInf : static_cast<float>(r.target * kLn2);
    }
  });
  return 0;
}

extern "C" void rl_cpu_stats_merge(const float* stats, int64_t world, int64_t rows, const rl_logprobs_out* out, int threads) {
  parallel_for(rows, 4096, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* first = stats + i * RL_NUM_STATS;
      const int64_t step = rows * RL_NUM_STATS;
      Scored s;
      float top = -kInf, target = -kInf;
      for (int64_t w = 0; w < world; ++w) {
        const float* shard = first + w * step;
        top = shard[0] > top || shard[0] != shard[0] ? shard[0] : top;
        target = std::max(target, shard[4]);
      }
      if (first[4] == kInf) {
        put(*out, i, s);
        continue;
      }
      if (top == -kInf) {
        s.logprobs = s.lse = -kInf;
        put(*out, i, s);
        continue;
      }
      double sum = 0, dot = 0, square = 0;
      for (int64_t w = 0; w < world; ++w) {  // in rank order: every rank gets the same bits
        const float* shard = first + w * step;
        const double shift = static_cast<double>(shard[0]) - top, factor = std::exp(shift);
        sum += shard[1] * factor;
        dot += factor * (shard[2] + (factor > 0 ? shift * shard[1] : 0));
        square += shard[3] * factor * factor;
      }
      const double log_sum = std::log(sum);
      s.logprobs = static_cast<float>(static_cast<double>(target) - top - log_sum);
      s.entropy = static_cast<float>(log_sum - dot / sum);
      s.sum_pi_squared = static_cast<float>(square / (sum * sum));
      s.lse = static_cast<float>(top + log_sum);
      put(*out, i, s);
    }
  });
}
