// The CPU kernels as Python functions: tensors are checked here, kernels run without the GIL, outputs come from torch.
#include <pybind11/pybind11.h>

#include <vector>

#include "bindings.h"
#include "isa.h"
#include "rl_csrc/kernels.h"
#include "tensor_arg.h"

namespace py = pybind11;

namespace rl {
namespace {

using Handle = py::handle;

// Without the GIL, where the work is worth the price of letting it go.
template <class Body>
auto unlocked(std::int64_t work, const Body& body) {
  if (work < 1 << 14) return body();
  py::gil_scoped_release released;
  return body();
}

std::int32_t float_type(const TensorArg& arg) {
  const dl::DataType& t = arg.dtype();
  if (t.code == 2 && t.bits == 32) return RL_F32;
  if (t.code == 2 && t.bits == 16) return RL_F16;
  if (t.code == 4 && t.bits == 16) return RL_BF16;
  arg.refuse("float32, bfloat16 or float16");
}

std::int64_t rows_stride(const TensorArg& arg) {
  if (arg.ndim() != 2 || (arg.size(1) > 1 && arg.stride(1) != 1)) arg.refuse("two dimensions with adjacent columns");
  return arg.size(0) > 1 ? arg.stride(0) : arg.size(1);
}

std::int64_t label_count(Handle labels) {
  TensorArg arg(labels, "labels");
  arg.shaped({-1});
  return arg.size(0);
}

// Everything about the rows but their memory.
rl_logits scored_rows(Handle labels, Handle temperature, double softcap, Handle ignore_index, std::int64_t vocab_start) {
  rl_logits in{};
  in.rows = label_count(labels);
  in.labels = elements<std::int64_t>(labels, "labels", in.rows);
  if (PyFloat_Check(temperature.ptr()))
    in.scalar_temperature = static_cast<float>(PyFloat_AS_DOUBLE(temperature.ptr()));
  else
    in.temperature = elements<float>(temperature, "temperature", in.rows);
  in.softcap = static_cast<float>(softcap);
  in.has_ignore = !ignore_index.is_none();
  in.ignore_index = in.has_ignore ? ignore_index.cast<std::int64_t>() : 0;
  in.vocab_start = vocab_start;
  return in;
}

rl_logits logit_rows(Handle logits, Handle labels, Handle temperature, double softcap, Handle ignore_index, Handle row_index,
                     std::int64_t vocab_start) {
  rl_logits in = scored_rows(labels, temperature, softcap, ignore_index, vocab_start);
  TensorArg data(logits, "logits");
  data.on_cpu();
  in.dtype = float_type(data);
  in.row_stride = rows_stride(data);
  in.data = data.data();
  in.vocab = data.size(1);
  in.row_index = elements<std::int64_t>(row_index, "row_index", in.rows);
  const std::int64_t num_rows = data.size(0);
  if (!in.row_index && num_rows != in.rows) data.refuse(std::to_string(in.rows) + " rows, one per label");
  for (std::int64_t i = 0; in.row_index && i < in.rows; ++i)
    if (in.row_index[i] < 0 || in.row_index[i] >= num_rows)
      raise("ArgumentError", "row_index[" + std::to_string(i) + "] is " + std::to_string(in.row_index[i]) + "; allowed are 0 to " +
                                 std::to_string(num_rows - 1) + ".");
  return in;
}

void check_labels(std::int64_t bad, const rl_logits& in) {
  if (bad == 0) return;
  raise("LabelError", "labels[" + std::to_string(bad - 1) + "] is " + std::to_string(in.labels[bad - 1]) + "; allowed are 0 to " +
                          std::to_string(in.vocab - 1) + " and ignore_index. Check that the labels were made with this model's tokenizer.");
}

struct GradientRows {
  void* data;
  std::int64_t stride, rows;
};

GradientRows gradient_rows(Handle out, Handle logits, const rl_logits& in) {
  TensorArg grad(out, "out");
  const TensorArg data(logits, "logits");
  grad.on_cpu().shaped({data.size(0), data.size(1)});
  const GradientRows g{grad.data(), rows_stride(grad), grad.size(0)};
  if (float_type(grad) != in.dtype) grad.refuse("the dtype of the logits");
  if (g.stride < in.vocab) grad.refuse("rows that do not overlap");
  return g;
}

// Rows that no label scores have gradient 0; a row scored twice would need a sum that the kernels do not make.
void clear_unscored(const rl_logits& in, const GradientRows& g) {
  if (!in.row_index) return;
  std::vector<bool> scored(static_cast<std::size_t>(g.rows), false);
  for (std::int64_t i = 0; i < in.rows; ++i) {
    auto seen = scored[static_cast<std::size_t>(in.row_index[i])];
    if (seen) raise("ArgumentError", "row_index names row " + std::to_string(in.row_index[i]) + " twice; a gradient wants each row once at most.");
    seen = true;
  }
  const std::int64_t element = in.dtype == RL_F32 ? 4 : 2;
  for (std::int64_t r = 0; r < g.rows; ++r)
    if (!scored[static_cast<std::size_t>(r)])
      std::memset(static_cast<char*>(g.data) + r * g.stride * element, 0, static_cast<std::size_t>(in.vocab * element));
}

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
  if (h.size(1) % 32) h.refuse("a multiple of 32 columns");
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

rl_loss_spec loss_spec(const py::tuple& t) {
  const auto code = [&](int i) { return t[static_cast<std::size_t>(i)].cast<std::int32_t>(); };
  const auto number = [&](int i) { return t[static_cast<std::size_t>(i)].cast<float>(); };
  return {code(0), code(1), code(2), code(3), number(4), number(5), number(6), number(7), number(8), number(9), number(10), number(11), number(12)};
}

void check_offsets(const std::int64_t* cu, std::int64_t sequences, std::int64_t tokens, const char* name) {
  bool ordered = sequences >= 0 && cu[0] == 0 && cu[sequences] == tokens;
  for (std::int64_t b = 0; ordered && b < sequences; ++b) ordered = cu[b] <= cu[b + 1];
  if (!ordered)
    raise("ArgumentError", std::string(name) + " must start at 0, never fall, and end at the number of tokens, " + std::to_string(tokens) + ".");
}

// cu_seqlens [B + 1] and B.
std::pair<const std::int64_t*, std::int64_t> offsets(Handle cu_seqlens, const char* name, std::int64_t tokens) {
  TensorArg arg(cu_seqlens, name);
  arg.shaped({-1});
  if (arg.size(0) < 1) arg.refuse("at least one entry");
  const auto* cu = elements<std::int64_t>(cu_seqlens, name);
  check_offsets(cu, arg.size(0) - 1, tokens, name);
  return {cu, arg.size(0) - 1};
}

rl_policy_batch policy_batch(Handle scored, Handle old_logprobs, Handle advantages, Handle mask, Handle cu_seqlens, Handle ref,
                             Handle weights, Handle entropy, double denominator) {
  rl_policy_batch b{};
  TensorArg tokens(old_logprobs, "old_logprobs");
  tokens.shaped({-1});
  b.tokens = tokens.size(0);
  b.logprobs = elements<float>(scored, "logprobs", b.tokens);
  b.old_logprobs = elements<float>(old_logprobs, "old_logprobs", b.tokens);
  b.advantages = elements<float>(advantages, "advantages", b.tokens);
  b.ref_logprobs = elements<float>(ref, "ref_logprobs", b.tokens);
  b.weights = elements<float>(weights, "weights", b.tokens);
  b.entropy = elements<float>(entropy, "entropy", b.tokens);
  b.mask = elements<std::uint8_t>(mask, "loss_mask", b.tokens);
  std::tie(b.cu_seqlens, b.sequences) = offsets(cu_seqlens, "cu_seqlens", b.tokens);
  b.denominator = denominator;
  return b;
}

void policy_loss(Handle scored, Handle old_logprobs, Handle advantages, Handle mask, Handle cu_seqlens, Handle ref, Handle weights,
                 Handle entropy, double denominator, const py::tuple& options, Handle loss, Handle metrics, Handle grad_logprobs,
                 Handle grad_entropy, int threads) {
  const rl_policy_batch b = policy_batch(scored, old_logprobs, advantages, mask, cu_seqlens, ref, weights, entropy, denominator);
  const rl_loss_spec spec = loss_spec(options);
  float *l = elements<float>(loss, "loss", 1), *m = elements<float>(metrics, "metrics", RL_NUM_METRICS);
  float *g = elements<float>(grad_logprobs, "grad_logprobs", b.tokens), *e = elements<float>(grad_entropy, "grad_entropy", b.tokens);
  unlocked(b.tokens, [&] { rl_cpu_policy_loss(&b, &spec, l, m, g, e, threads); });
}

void policy_loss_from_logits(Handle logits, Handle labels, Handle temperature, double softcap, Handle row_index, Handle old_logprobs,
                             Handle advantages, Handle mask, Handle cu_seqlens, Handle ref, Handle weights, double denominator,
                             const py::tuple& options, Handle scored, Handle entropy, Handle out, Handle loss, Handle metrics, int threads) {
  const rl_logits in = logit_rows(logits, labels, temperature, softcap, py::int_(-100), row_index, 0);
  const rl_policy_batch b = policy_batch(py::none(), old_logprobs, advantages, mask, cu_seqlens, ref, weights, py::none(), denominator);
  if (b.tokens != in.rows) raise("ArgumentError", "labels and old_logprobs differ in length.");
  const rl_loss_spec spec = loss_spec(options);
  float *lp = elements<float>(scored, "logprobs", in.rows), *ent = elements<float>(entropy, "entropy", in.rows);
  float *l = elements<float>(loss, "loss", 1), *m = elements<float>(metrics, "metrics", RL_NUM_METRICS);
  const GradientRows g = out.is_none() ? GradientRows{} : gradient_rows(out, logits, in);
  const std::int64_t bad = unlocked(in.rows * in.vocab, [&] {
    return rl_cpu_policy_loss_from_logits(&in, &b, &spec, lp, ent, g.data, g.stride, l, m, threads);
  });
  check_labels(bad, in);
  if (g.data) clear_unscored(in, g);
}

void scan_reverse(Handle rewards, Handle values, Handle cu_seqlens, Handle mask, Handle rho, Handle lam, Handle bootstrap, int kind,
                  int mask_mode, double gamma, double rho_clip, double c_clip, Handle advantages, Handle returns, int threads) {
  rl_scan in{};
  TensorArg r(rewards, "rewards");
  r.shaped({-1});
  const std::int64_t tokens = r.size(0);
  std::tie(in.cu_seqlens, in.sequences) = offsets(cu_seqlens, "cu_seqlens", tokens);
  in.rewards = elements<float>(rewards, "rewards", tokens);
  in.values = elements<float>(values, "values", tokens);
  in.rho = elements<float>(rho, "rho", tokens);
  in.mask = elements<std::uint8_t>(mask, "loss_mask", tokens);
  in.bootstrap = elements<float>(bootstrap, "bootstrap_values", in.sequences);
  if (PyFloat_Check(lam.ptr()))
    in.scalar_lam = PyFloat_AS_DOUBLE(lam.ptr());
  else
    in.lam = elements<float>(lam, "lam", in.sequences);
  in.kind = kind, in.mask_mode = mask_mode, in.gamma = gamma, in.rho_clip = rho_clip, in.c_clip = c_clip;
  float *a = elements<float>(advantages, "advantages", tokens), *g = elements<float>(returns, "returns", tokens);
  unlocked(tokens, [&] { rl_cpu_scan_reverse(&in, a, g, threads); });
}

void group_norm(Handle rewards, Handle group_ids, Handle cu_groups, int mode, double eps, Handle out) {
  TensorArg r(rewards, "rewards");
  r.shaped({-1});
  const std::int64_t size = r.size(0);
  const auto* x = elements<float>(rewards, "rewards", size);
  const auto* ids = elements<std::int64_t>(group_ids, "group_ids", size);
  std::pair<const std::int64_t*, std::int64_t> cu{nullptr, 0};
  if (!ids) cu = offsets(cu_groups, "cu_groups", size);
  float* result = elements<float>(out, "out", size);
  unlocked(size, [&] { rl_cpu_group_norm(x, ids, cu.first, size, cu.second, mode, eps, result); });
}

void masked_moments(Handle x, Handle mask, Handle out, int threads) {
  TensorArg arg(x, "x");
  const std::int64_t size = arg.numel();
  const auto* values = elements<float>(x, "x");
  const auto* m = elements<std::uint8_t>(mask, "mask", size);
  double* result = elements<double>(out, "out", 3);
  unlocked(size, [&] { rl_cpu_masked_moments(values, m, size, result, threads); });
}

void whiten(Handle x, Handle mask, double mean, double scale, double shift, Handle out, int threads) {
  TensorArg arg(x, "x");
  const std::int64_t size = arg.numel();
  const auto* values = elements<float>(x, "x");
  const auto* m = elements<std::uint8_t>(mask, "mask", size);
  float* result = elements<float>(out, "out", size);
  unlocked(size, [&] { rl_cpu_whiten(values, m, size, mean, scale, shift, result, threads); });
}

struct Spans {
  std::vector<const void*> sources;
  std::vector<void*> destinations;
  std::vector<std::int64_t> nbytes;
  std::int64_t total = 0;

  void add(const void* source, void* destination, std::int64_t n) {
    if (n == 0) return;
    sources.push_back(source), destinations.push_back(destination), nbytes.push_back(n);
    total += n;
  }
  void copy(int threads) const {
    unlocked(total, [&] {
      rl_cpu_copy_spans(sources.data(), destinations.data(), nbytes.data(), static_cast<std::int64_t>(nbytes.size()), threads);
    });
  }
};

// Copies what it can (dense, same type and shape) and returns the positions of the pairs it left.
py::list bucket_copy(const py::list& sources, const py::list& destinations, int threads) {
  Spans spans;
  py::list left;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const TensorArg source(sources[i], "a source"), destination(destinations[i], "a destination");
    bool same = source.ndim() == destination.ndim();
    for (int d = 0; same && d < source.ndim(); ++d) same = source.size(d) == destination.size(d);
    if (!same) destination.refuse("the shape of its source, " + source.describe());
    const bool plain = source.contiguous() && destination.contiguous() && source.dtype().code == destination.dtype().code &&
                       source.dtype().bits == destination.dtype().bits;
    if (plain)
      spans.add(source.data(), destination.data(), source.nbytes());
    else
      left.append(i);
  }
  spans.copy(threads);
  return left;
}

std::int64_t row_bytes(const TensorArg& arg, int lead) {
  std::int64_t n = arg.dtype().bits / 8;
  for (int d = lead; d < arg.ndim(); ++d) n *= arg.size(d);
  return n;
}

// Row b of `padded` [B, L, ...] from starts[b], lengths[b] steps of it, to or from `values` [T, ...].
void pack(Handle padded, Handle values, Handle cu_seqlens, Handle starts, bool unpacking, int threads) {
  TensorArg wide(padded, "padded"), flat(values, "values");
  wide.on_cpu().dense();
  flat.on_cpu().dense();
  const auto [cu, sequences] = offsets(cu_seqlens, "cu_seqlens", flat.size(0));
  if (wide.ndim() < 2 || wide.size(0) != sequences) wide.refuse(std::to_string(sequences) + " rows");
  const auto* first = elements<std::int64_t>(starts, "starts", sequences);
  const std::int64_t step = row_bytes(flat, 1), length = wide.size(1);
  if (row_bytes(wide, 2) != step) wide.refuse("steps as large as those of values, " + flat.describe());
  Spans spans;
  for (std::int64_t b = 0; b < sequences; ++b) {
    const std::int64_t n = cu[b + 1] - cu[b], at = first ? first[b] : 0;
    if (at < 0 || at + n > length)
      raise("ArgumentError", "sequence " + std::to_string(b) + " takes steps " + std::to_string(at) + " to " + std::to_string(at + n) + " of rows of " +
                                 std::to_string(length) + ".");
    char* inside = static_cast<char*>(wide.data()) + (b * length + at) * step;
    char* packed = static_cast<char*>(flat.data()) + cu[b] * step;
    unpacking ? spans.add(packed, inside, n * step) : spans.add(inside, packed, n * step);
  }
  spans.copy(threads);
}

void cp_slice(Handle x, Handle cu_seqlens, std::int64_t rank, std::int64_t size, Handle out, int threads) {
  TensorArg from(x, "x"), to(out, "out");
  from.on_cpu().dense();
  to.on_cpu().dense();
  const auto [cu, sequences] = offsets(cu_seqlens, "cu_seqlens", from.size(0));
  const std::int64_t step = row_bytes(from, 1);
  Spans spans;
  char* next = static_cast<char*>(to.data());
  for (std::int64_t b = 0; b < sequences; ++b) {
    const std::int64_t length = cu[b + 1] - cu[b];
    if (length % (2 * size))
      raise("ArgumentError", "sequence " + std::to_string(b) + " has " + std::to_string(length) + " tokens, which 2 * cp_size = " +
                                 std::to_string(2 * size) + " does not divide. Pad the sequences first.");
    const std::int64_t chunk = length / (2 * size);
    for (const std::int64_t number : {rank, 2 * size - 1 - rank}) {
      spans.add(static_cast<char*>(from.data()) + (cu[b] + number * chunk) * step, next, chunk * step);
      next += chunk * step;
    }
  }
  if (next != static_cast<char*>(to.data()) + to.nbytes()) to.refuse("1 / cp_size of the tokens");
  spans.copy(threads);
}

void roll_labels(Handle token_ids, Handle cu_seqlens, Handle mask, std::int64_t ignore_index, Handle out) {
  TensorArg ids(token_ids, "token_ids");
  ids.shaped({-1});
  const std::int64_t tokens = ids.size(0);
  const auto* from = elements<std::int64_t>(token_ids, "token_ids", tokens);
  const auto* counted = elements<std::uint8_t>(mask, "loss_mask", tokens);
  auto* to = elements<std::int64_t>(out, "out", tokens);
  const auto [cu, sequences] = offsets(cu_seqlens, "cu_seqlens", tokens);
  for (std::int64_t b = 0; b < sequences; ++b) {
    for (std::int64_t t = cu[b]; t + 1 < cu[b + 1]; ++t) to[t] = !counted || counted[t + 1] ? from[t + 1] : ignore_index;
    if (cu[b + 1] > cu[b]) to[cu[b + 1] - 1] = ignore_index;
  }
}

std::uint64_t read_floor(Handle x) {
  TensorArg arg(x, "x");
  arg.on_cpu().dense();
  return unlocked(arg.nbytes(), [&] { return rl_cpu_read_floor(arg.data(), arg.nbytes()); });
}

void rewrite_floor(Handle x) {
  TensorArg arg(x, "x");
  arg.on_cpu().dense();
  unlocked(arg.nbytes(), [&] { rl_cpu_rewrite_floor(arg.data(), arg.nbytes()); });
}

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("kernel_level", &isa_level, "Level of the CPU kernels in use: 0 baseline, 1 AVX2, 2 AVX-512, 3 AVX-512 with bf16 products, 4 with AMX tiles.");
  m.def("set_kernel_level", &set_isa_level, "Lower the level (-1: the machine's best); returns the one in force. For tests.");
  m.def("read_floor", &read_floor, "Read a tensor's bytes once: the limit of benchmarks.");
  m.def("rewrite_floor", &rewrite_floor, "Read and write a tensor's bytes once, in place: the limit of benchmarks.");
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
  m.def("policy_loss", &policy_loss);
  m.def("policy_loss_from_logits", &policy_loss_from_logits);
  m.def("scan_reverse", &scan_reverse);
  m.def("group_norm", &group_norm);
  m.def("masked_moments", &masked_moments);
  m.def("whiten", &whiten);
  m.def("bucket_copy", &bucket_copy);
  m.def("pack", &pack);
  m.def("cp_slice", &cp_slice);
  m.def("roll_labels", &roll_labels);
}
}  // namespace rl
