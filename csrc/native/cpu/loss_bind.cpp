// Losses, advantages and moments as Python functions.
#include <tuple>

#include "bindings.h"
#include "kernels_bind.h"
#include "loss_spec_bind.h"

namespace py = pybind11;

namespace rl {
namespace {

rl_policy_batch policy_batch(Handle scored, Handle old_logprobs, Handle advantages, Handle mask, Handle cu_seqlens, Handle ref,
                             Handle weights, Handle entropy, Handle denominator) {
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
  if (PyFloat_Check(denominator.ptr()))
    b.denominator = PyFloat_AS_DOUBLE(denominator.ptr());
  else
    b.denominators = elements<float>(denominator, "denominator", b.sequences);
  return b;
}

void policy_loss(Handle scored, Handle old_logprobs, Handle advantages, Handle mask, Handle cu_seqlens, Handle ref, Handle weights,
                 Handle entropy, Handle denominator, const rl_loss_spec& spec, Handle loss, Handle metrics, Handle grad_logprobs,
                 Handle grad_entropy, int threads) {
  const rl_policy_batch b = policy_batch(scored, old_logprobs, advantages, mask, cu_seqlens, ref, weights, entropy, denominator);
  float *l = elements<float>(loss, "loss", 1), *m = elements<float>(metrics, "metrics", RL_NUM_METRICS);
  float *g = elements<float>(grad_logprobs, "grad_logprobs", b.tokens), *e = elements<float>(grad_entropy, "grad_entropy", b.tokens);
  unlocked(b.tokens, [&] { rl_cpu_policy_loss(&b, &spec, l, m, g, e, threads); });
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

}  // namespace

void bind_losses(py::module_& m) {
  bind_loss_spec(m);
  m.def("policy_loss", &policy_loss);
  m.def("scan_reverse", &scan_reverse);
  m.def("group_norm", &group_norm);
  m.def("masked_moments", &masked_moments);
  m.def("whiten", &whiten);
}
}  // namespace rl
