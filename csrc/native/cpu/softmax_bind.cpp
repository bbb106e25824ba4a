// Log-probs from logits or hidden states, and draws, as Python functions.
#include "bindings.h"
#include "kernels_bind.h"

namespace py = pybind11;

namespace rl {
namespace {

rl_logprobs_out results(Handle logprobs, Handle entropy, Handle square, Handle lse, std::int64_t rows) {
  return {elements<float>(logprobs, "logprobs", rows), elements<float>(entropy, "entropy", rows),
          elements<float>(square, "sum_pi_squared", rows), elements<float>(lse, "lse", rows)};
}

void logprobs(Handle logits, Handle labels, Handle temperature, double softcap, Handle ignore_index, Handle row_index,
              Handle out_logprobs, Handle entropy, Handle square, Handle lse, int threads) {
  const rl_logits in = logit_rows(logits, labels, temperature, softcap, ignore_index, row_index, 0);
  const rl_logprobs_out out = results(out_logprobs, entropy, square, lse, in.rows);
  check_labels(unlocked(in.rows * in.vocab, [&] { return rl_cpu_logprobs(&in, &out, threads); }), in);
}

void logprobs_backward(Handle logits, Handle labels, Handle temperature, double softcap, Handle ignore_index, Handle row_index,
                       std::int64_t vocab_start, Handle scored, Handle lse, Handle entropy, Handle grad_logprobs, Handle grad_entropy,
                       Handle out, int threads) {
  const rl_logits in = logit_rows(logits, labels, temperature, softcap, ignore_index, row_index, vocab_start);
  const GradientRows g = gradient_rows(out, logits, in);
  rl_logprobs_grad grad{elements<float>(scored, "logprobs", in.rows),
                        elements<float>(lse, "lse", in.rows),
                        elements<float>(entropy, "entropy", in.rows),
                        elements<float>(grad_logprobs, "grad_logprobs", in.rows),
                        elements<float>(grad_entropy, "grad_entropy", in.rows),
                        g.data,
                        g.stride};
  clear_unscored(in, g);
  unlocked(in.rows * in.vocab, [&] { return rl_cpu_logprobs_backward(&in, &grad, threads); });
}

void logprobs_with_grad(Handle logits, Handle labels, Handle temperature, double softcap, Handle ignore_index, Handle row_index,
                        Handle out_logprobs, Handle out_entropy, Handle square, Handle grad_logprobs, Handle grad_entropy, Handle out_grad,
                        int threads) {
  const rl_logits in = logit_rows(logits, labels, temperature, softcap, ignore_index, row_index, 0);
  const rl_logprobs_out out = results(out_logprobs, out_entropy, square, py::none(), in.rows);
  const GradientRows g = gradient_rows(out_grad, logits, in);
  rl_logprobs_grad grad{};
  grad.grad_logprobs = elements<float>(grad_logprobs, "grad_logprobs", in.rows);
  grad.grad_entropy = elements<float>(grad_entropy, "grad_entropy", in.rows);
  grad.grad_logits = g.data;
  grad.grad_stride = g.stride;
  check_labels(unlocked(in.rows * in.vocab, [&] { return rl_cpu_logprobs_with_grad(&in, &out, &grad, threads); }), in);
  clear_unscored(in, g);
}

void logprob_stats(Handle logits, Handle labels, Handle temperature, double softcap, Handle ignore_index, Handle row_index,
                   std::int64_t vocab_start, Handle stats, int threads) {
  const rl_logits in = logit_rows(logits, labels, temperature, softcap, ignore_index, row_index, vocab_start);
  float* out = elements<float>(stats, "stats", in.rows * RL_NUM_STATS);
  unlocked(in.rows * in.vocab, [&] { return rl_cpu_logprob_stats(&in, out, threads); });
}

void stats_merge(Handle stats, Handle scored, Handle entropy, Handle square, Handle lse, int threads) {
  TensorArg arg(stats, "stats");
  arg.shaped({-1, -1, RL_NUM_STATS});
  const std::int64_t world = arg.size(0), rows = arg.size(1);
  const float* in = elements<float>(stats, "stats");
  const rl_logprobs_out out = results(scored, entropy, square, lse, rows);
  unlocked(world * rows, [&] { rl_cpu_stats_merge(in, world, rows, &out, threads); });
}

void draw(Handle logits, Handle temperature, Handle streams, Handle positions, Handle is_greedy, Handle ids, Handle scored, int threads) {
  TensorArg data(logits, "logits");
  data.on_cpu();
  rl_logits in{};
  if (float_type(data) != RL_F32) data.refuse("float32");
  in.row_stride = rows_stride(data);
  in.data = data.data(), in.rows = data.size(0), in.vocab = data.size(1);
  if (in.vocab < 1) data.refuse("at least one token to draw from");
  in.temperature = elements<float>(temperature, "temperature", in.rows);
  const rl_draw out{elements<std::int64_t>(streams, "streams", in.rows), elements<std::int64_t>(positions, "positions", in.rows),
                    elements<std::uint8_t>(is_greedy, "is_greedy", in.rows), elements<std::int64_t>(ids, "ids", in.rows),
                    elements<float>(scored, "logprobs", in.rows)};
  unlocked(in.rows * in.vocab, [&] { rl_cpu_draw(&in, &out, threads); });
}

// bf16 operands of the LM head; the rest of `in` comes with the labels.
rl_linear linear_operands(Handle hidden, Handle weight, Handle bias, rl_logits* in) {
  TensorArg h(hidden, "hidden"), w(weight, "weight");
  h.on_cpu().shaped({in->rows, -1});
  w.on_cpu().shaped({-1, h.size(1)});
  if (float_type(h) != RL_BF16 || float_type(w) != RL_BF16) h.refuse("bfloat16, as the weight must be");
  if (h.size(1) < 1 || h.size(1) % 32) h.refuse("a multiple of 32 columns");
  in->vocab = w.size(0);
  return {static_cast<const std::uint16_t*>(h.data()), rows_stride(h), static_cast<const std::uint16_t*>(w.data()), rows_stride(w),
          elements<float>(bias, "bias", in->vocab), h.size(1)};
}

struct Kept {
  std::uint16_t* values;
  float* top;
};

Kept kept_values(Handle kept, Handle kept_top, const rl_logits& in) {
  if (kept.is_none()) return {nullptr, nullptr};
  TensorArg values(kept, "kept");
  const std::int64_t padded = (in.rows + 31) / 32 * 32;
  values.on_cpu().dense().shaped({in.vocab, padded});
  if (float_type(values) != RL_BF16) values.refuse("bfloat16");
  return {static_cast<std::uint16_t*>(values.data()), elements<float>(kept_top, "kept_top", (in.vocab + 31) / 32 * padded)};
}

void linear_rescale(Handle kept, Handle kept_top, Handle labels, Handle temperature, Handle ignore_index, Handle scored, Handle lse,
                    Handle grad_logprobs, int threads) {
  rl_logits in = scored_rows(labels, temperature, 0, ignore_index, 0);
  in.vocab = TensorArg(kept, "kept").size(0);
  const Kept k = kept_values(kept, kept_top, in);
  rl_logprobs_grad grad{};
  grad.logprobs = elements<float>(scored, "logprobs", in.rows);
  grad.lse = elements<float>(lse, "lse", in.rows);
  grad.grad_logprobs = elements<float>(grad_logprobs, "grad_logprobs", in.rows);
  unlocked(in.rows * in.vocab, [&] { rl_cpu_linear_rescale(&in, &grad, k.values, k.top, threads); });
}

void linear_logprobs(Handle hidden, Handle weight, Handle bias, Handle labels, Handle temperature, double softcap, Handle ignore_index,
                     Handle scored, Handle entropy, Handle square, Handle lse, Handle kept, Handle kept_top, int threads) {
  rl_logits in = scored_rows(labels, temperature, softcap, ignore_index, 0);
  const rl_linear linear = linear_operands(hidden, weight, bias, &in);
  if (!kept.is_none() && (linear.bias || softcap != 0 || !square.is_none()))
    raise("ArgumentError", "kept wants a head without bias and softcap, and no sum_pi_squared.");
  const Kept k = kept_values(kept, kept_top, in);
  const rl_logprobs_out out = results(scored, entropy, square, lse, in.rows);
  check_labels(unlocked(in.rows * in.vocab, [&] { return rl_cpu_linear_logprobs(&in, &linear, &out, k.values, k.top, threads); }), in);
}

void linear_gradient(Handle hidden, Handle weight, Handle bias, Handle labels, Handle temperature, double softcap, Handle ignore_index,
                     Handle scored, Handle lse, Handle entropy, Handle grad_logprobs, Handle grad_entropy, std::int64_t first, Handle out,
                     int threads) {
  rl_logits in = scored_rows(labels, temperature, softcap, ignore_index, 0);
  const rl_linear linear = linear_operands(hidden, weight, bias, &in);
  rl_logprobs_grad grad{elements<float>(scored, "logprobs", in.rows),
                        elements<float>(lse, "lse", in.rows),
                        elements<float>(entropy, "entropy", in.rows),
                        elements<float>(grad_logprobs, "grad_logprobs", in.rows),
                        elements<float>(grad_entropy, "grad_entropy", in.rows),
                        nullptr,
                        0};
  TensorArg target(out, "out");
  target.on_cpu().dense().shaped({-1, (in.rows + 31) / 32 * 32});
  if (float_type(target) != RL_BF16) target.refuse("bfloat16");
  const std::int64_t last = first + target.size(0);
  if (first < 0 || last > in.vocab) target.refuse("rows within the vocabulary");
  auto* data = static_cast<std::uint16_t*>(target.data());
  unlocked(in.rows * in.vocab, [&] { rl_cpu_linear_gradient(&in, &linear, &grad, first, last, data, threads); });
}

}  // namespace

void bind_softmax(py::module_& m) {
  m.def("logprobs", &logprobs);
  m.def("logprobs_backward", &logprobs_backward);
  m.def("logprobs_with_grad", &logprobs_with_grad);
  m.def("logprob_stats", &logprob_stats);
  m.def("stats_merge", &stats_merge);
  m.def("draw", &draw);
  m.def("has_tiles", &rl_cpu_has_tiles, "Whether the LM head runs on tiles (bf16 products of AVX-512, or AMX) at the level in use.");
  m.def("linear_logprobs", &linear_logprobs);
  m.def("linear_gradient", &linear_gradient);
  m.def("linear_rescale", &linear_rescale);
}
}  // namespace rl
