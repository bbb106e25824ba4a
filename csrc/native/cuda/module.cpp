// The Python face of the CUDA kernels: addresses, sizes and a stream in, a raised error out. The GIL is free during launches.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "rl_csrc/kernels_cuda.h"

namespace py = pybind11;

namespace {

using Address = uintptr_t;  // 0: absent

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void check(int status, const char* what) {
  if (status == 0) return;
  throw std::runtime_error(std::string(what) + ": the CUDA launch failed with " + rl_cuda_error_name(status) + " (" +
                           rl_cuda_error_text(status) + "). An earlier kernel may be the cause: run with CUDA_LAUNCH_BLOCKING=1.");
}

template <typename F>
void launch(const char* what, F&& f) {
  int status;
  {
    py::gil_scoped_release release;
    status = f();
  }
  check(status, what);
}

rl_logits make_logits(Address data, int64_t row_stride, int64_t vocab, int64_t rows, int dtype, Address labels, Address row_index,
                      Address temperature, float scalar_temperature, float softcap, py::object ignore_index, int64_t vocab_start) {
  rl_logits a{};
  a.data = at<void>(data);
  a.row_stride = row_stride;
  a.vocab = vocab;
  a.rows = rows;
  a.dtype = dtype;
  a.labels = at<int64_t>(labels);
  a.row_index = at<int64_t>(row_index);
  a.temperature = at<float>(temperature);
  a.scalar_temperature = scalar_temperature;
  a.softcap = softcap;
  a.has_ignore = !ignore_index.is_none();
  a.ignore_index = a.has_ignore ? ignore_index.cast<int64_t>() : 0;
  a.vocab_start = vocab_start;
  return a;
}

rl_loss_spec make_spec(int loss, int kl, int aggregation, float clip_low, float clip_high, py::object clip_dual, float ratio_max,
                       float tau_pos, float tau_neg, float dro_beta, float kl_coef, float entropy_coef) {
  rl_loss_spec s{};
  s.loss = loss;
  s.kl = kl;
  s.aggregation = aggregation;
  s.clip_low = clip_low;
  s.clip_high = clip_high;
  s.has_dual = !clip_dual.is_none();
  s.clip_dual = s.has_dual ? clip_dual.cast<float>() : 0.f;
  s.ratio_max = ratio_max;
  s.tau_pos = tau_pos;
  s.tau_neg = tau_neg;
  s.dro_beta = dro_beta;
  s.kl_coef = kl_coef;
  s.entropy_coef = entropy_coef;
  return s;
}

rl_loss_tokens make_tokens(Address old_logprobs, Address advantages, Address loss_mask, Address ref_logprobs, Address weights,
                           Address denominator, float scalar_denominator) {
  return {at<float>(old_logprobs), at<float>(advantages), at<uint8_t>(loss_mask),
          at<float>(ref_logprobs), at<float>(weights),    at<float>(denominator),
          scalar_denominator};
}

void bind_logprobs(py::module_& m) {
  py::class_<rl_logits>(m, "Logits").def(py::init(&make_logits), py::kw_only(), py::arg("data"), py::arg("row_stride"),
                                         py::arg("vocab"), py::arg("rows"), py::arg("dtype"), py::arg("labels"),
                                         py::arg("row_index"), py::arg("temperature"), py::arg("scalar_temperature"),
                                         py::arg("softcap"), py::arg("ignore_index"), py::arg("vocab_start"));
  m.def("logprobs", [](const rl_logits& a, Address logprobs, Address entropy, Address square, Address lse, Address stream) {
    const rl_logprobs_out out{at<float>(logprobs), at<float>(entropy), at<float>(square), at<float>(lse)};
    launch("logprobs", [&] { return rl_cuda_logprobs(&a, &out, at<void>(stream)); });
  });
  m.def("logprob_stats", [](const rl_logits& a, Address stats, Address stream) {
    launch("logprob_stats", [&] { return rl_cuda_logprob_stats(&a, at<float>(stats), at<void>(stream)); });
  });
  m.def("stats_merge", [](Address stats, int64_t world, int64_t rows, Address logprobs, Address entropy, Address square, Address lse,
                          Address stream) {
    const rl_logprobs_out out{at<float>(logprobs), at<float>(entropy), at<float>(square), at<float>(lse)};
    launch("stats_merge", [&] { return rl_cuda_stats_merge(at<float>(stats), world, rows, &out, at<void>(stream)); });
  });
  m.def("zero_rows", [](Address data, int dtype, int64_t row_stride, int64_t rows, int64_t vocab, Address is_scored, Address stream) {
    launch("zero_rows", [&] {
      return rl_cuda_zero_rows(at<void>(data), dtype, row_stride, rows, vocab, at<uint8_t>(is_scored), at<void>(stream));
    });
  });
  m.def("logprobs_backward", [](const rl_logits& a, Address logprobs, Address lse, Address entropy, Address grad_logprobs,
                                Address grad_entropy, Address grad_logits, int64_t grad_stride, Address stream) {
    rl_logprobs_grad g{};
    g.logprobs = at<float>(logprobs);
    g.lse = at<float>(lse);
    g.entropy = at<float>(entropy);
    g.grad_logprobs = at<float>(grad_logprobs);
    g.grad_entropy = at<float>(grad_entropy);
    g.grad_logits = at<void>(grad_logits);
    g.grad_stride = grad_stride;
    launch("logprobs_backward", [&] { return rl_cuda_logprobs_backward(&a, &g, at<void>(stream)); });
  });
}

void bind_loss(py::module_& m) {
  py::class_<rl_loss_spec>(m, "LossSpec")
      .def(py::init(&make_spec), py::kw_only(), py::arg("loss"), py::arg("kl"), py::arg("aggregation"), py::arg("clip_low"),
           py::arg("clip_high"), py::arg("clip_dual"), py::arg("ratio_max"), py::arg("tau_pos"), py::arg("tau_neg"),
           py::arg("dro_beta"), py::arg("kl_coef"), py::arg("entropy_coef"));
  py::class_<rl_loss_tokens>(m, "LossTokens")
      .def(py::init(&make_tokens), py::kw_only(), py::arg("old_logprobs"), py::arg("advantages"), py::arg("loss_mask"),
           py::arg("ref_logprobs"), py::arg("weights"), py::arg("denominator"), py::arg("scalar_denominator"));
  m.def("policy_loss_partials", [](const rl_loss_spec& s, int64_t tokens, int64_t sequences) {
    return rl_cuda_policy_loss_partials(&s, tokens, sequences);
  });
  m.def("policy_loss", [](const rl_loss_spec& s, const rl_loss_tokens& t, Address logprobs, Address entropy, Address cu_seqlens,
                          int64_t tokens, int64_t sequences, Address loss, Address metrics, Address grad_logprobs,
                          Address grad_entropy, Address partials, Address counter, Address stream) {
    const rl_loss_io io{at<float>(logprobs), at<float>(entropy),       at<int64_t>(cu_seqlens), tokens,
                        sequences,           at<float>(loss),          at<float>(metrics),      at<float>(grad_logprobs),
                        at<float>(grad_entropy), at<float>(partials), at<uint32_t>(counter)};
    launch("policy_loss", [&] { return rl_cuda_policy_loss(&s, &t, &io, at<void>(stream)); });
  });
  // False where a row does not fit on the chip: nothing was launched.
  m.def("policy_loss_from_logits", [](const rl_logits& a, const rl_loss_spec& s, const rl_loss_tokens& t, Address logprobs,
                                      Address entropy, Address grad_logits, int64_t grad_stride, int grad_dtype, Address token_scale,
                                      Address given_grad, Address given_grad_entropy, Address stream) {
    const rl_fused_out out{at<float>(logprobs), at<float>(entropy),     at<void>(grad_logits), grad_stride,
                           grad_dtype,          at<float>(token_scale), at<float>(given_grad), at<float>(given_grad_entropy)};
    bool fits = true;
    launch("policy_loss_from_logits", [&] {
      const int status = rl_cuda_policy_loss_from_logits(&a, &s, &t, &out, at<void>(stream));
      fits = status != RL_CUDA_NOT_SUPPORTED;
      return fits ? status : 0;
    });
    return fits;
  });
}

void bind_estimators(py::module_& m) {
  m.def("scan_reverse", [](Address rewards, Address values, Address loss_mask, Address rho, Address lam, Address bootstrap_values,
                           Address cu_seqlens, int64_t sequences, float scalar_lam, float gamma, float rho_clip, float c_clip,
                           int kind, int mask_mode, Address advantages, Address returns, Address stream) {
    rl_device_scan s{};
    s.rewards = at<float>(rewards);
    s.values = at<float>(values);
    s.loss_mask = at<uint8_t>(loss_mask);
    s.rho = at<float>(rho);
    s.lam = at<float>(lam);
    s.bootstrap_values = at<float>(bootstrap_values);
    s.cu_seqlens = at<int64_t>(cu_seqlens);
    s.sequences = sequences;
    s.scalar_lam = scalar_lam;
    s.gamma = gamma;
    s.rho_clip = rho_clip;
    s.c_clip = c_clip;
    s.kind = kind;
    s.mask_mode = mask_mode;
    s.advantages = at<float>(advantages);
    s.returns = at<float>(returns);
    launch("scan_reverse", [&] { return rl_cuda_scan_reverse(&s, at<void>(stream)); });
  });
  m.def("group_norm", [](Address rewards, Address group_ids, Address cu_groups, int64_t rows, int64_t groups, int mode, double eps,
                         Address advantages, Address stream) {
    launch("group_norm", [&] {
      return rl_cuda_group_norm(at<float>(rewards), at<int64_t>(group_ids), at<int64_t>(cu_groups), rows, groups, mode, eps,
                                at<float>(advantages), at<void>(stream));
    });
  });
  m.def("moments_blocks", &rl_cuda_moments_blocks);
  m.def("masked_moments", [](Address x, Address mask, int64_t size, Address moments, Address partials, Address counter, Address stream) {
    launch("masked_moments", [&] {
      return rl_cuda_masked_moments(at<float>(x), at<uint8_t>(mask), size, at<double>(moments), at<double>(partials),
                                    at<uint32_t>(counter), at<void>(stream));
    });
  });
  m.def("whiten", [](Address x, Address mask, int64_t size, Address moments, bool shift_mean, double eps, Address out, Address stream) {
    launch("whiten", [&] {
      return rl_cuda_whiten(at<float>(x), at<uint8_t>(mask), size, at<double>(moments), shift_mean, eps, at<float>(out),
                            at<void>(stream));
    });
  });
}

// The copies of a bucket, made once and run many times.
struct CopyPlan {
  std::vector<uint64_t> sources, destinations, nbytes;

  CopyPlan(std::vector<uint64_t> from, std::vector<uint64_t> to, std::vector<uint64_t> sizes)
      : sources(std::move(from)), destinations(std::move(to)), nbytes(std::move(sizes)) {
    if (sources.size() != destinations.size() || sources.size() != nbytes.size())
      throw std::invalid_argument("bucket_copy: " + std::to_string(sources.size()) + " sources, " + std::to_string(destinations.size()) +
                                  " destinations and " + std::to_string(nbytes.size()) + " sizes; wanted as many of each.");
  }
  void run(Address stream) const {
    launch("bucket_copy", [&] {
      return rl_cuda_bucket_copy(sources.data(), destinations.data(), nbytes.data(), int64_t(sources.size()), at<void>(stream));
    });
  }
};

void bind_copies(py::module_& m) {
  py::class_<CopyPlan>(m, "CopyPlan")
      .def(py::init<std::vector<uint64_t>, std::vector<uint64_t>, std::vector<uint64_t>>(), py::arg("sources"), py::arg("destinations"),
           py::arg("nbytes"))
      .def("run", &CopyPlan::run, py::arg("stream"));
  m.def("pack", [](Address padded, Address cu, Address starts, int64_t sequences, int64_t length, int64_t tokens, int64_t token_bytes,
                   Address packed, Address stream) {
    launch("pack", [&] {
      return rl_cuda_pack(at<void>(padded), at<int64_t>(cu), at<int64_t>(starts), sequences, length, tokens, token_bytes,
                          at<void>(packed), at<void>(stream));
    });
  });
  m.def("unpack", [](Address packed, Address cu, int64_t sequences, int64_t length, int64_t tokens, int64_t token_bytes, bool pad_left,
                     Address padded, Address stream) {
    launch("unpack", [&] {
      return rl_cuda_unpack(at<void>(packed), at<int64_t>(cu), sequences, length, tokens, token_bytes, pad_left, at<void>(padded),
                            at<void>(stream));
    });
  });
  m.def("cp_slice", [](Address x, Address cu, int64_t sequences, int64_t tokens, int64_t token_bytes, int64_t cp_rank, int64_t cp_size,
                       Address out, Address stream) {
    launch("cp_slice", [&] {
      return rl_cuda_cp_slice(at<void>(x), at<int64_t>(cu), sequences, tokens, token_bytes, cp_rank, cp_size, at<void>(out),
                              at<void>(stream));
    });
  });
  m.def("roll_labels", [](Address ids, Address cu, int64_t sequences, int64_t tokens, Address mask, int64_t ignore_index, Address labels,
                          Address stream) {
    launch("roll_labels", [&] {
      return rl_cuda_roll_labels(at<int64_t>(ids), at<int64_t>(cu), sequences, tokens, at<uint8_t>(mask), ignore_index,
                                 at<int64_t>(labels), at<void>(stream));
    });
  });
  m.def("digest_many", [](const std::vector<uint64_t>& data, const std::vector<uint64_t>& nbytes, Address totals, Address stream) {
    if (data.size() != nbytes.size()) throw std::invalid_argument("digest_many: as many addresses as sizes are wanted.");
    launch("digest_many", [&] {
      return rl_cuda_digest_many(data.data(), nbytes.data(), int64_t(data.size()), at<uint64_t>(totals), at<void>(stream));
    });
  });
  m.def("digest_blocks", &rl_cuda_digest_blocks);
  m.def("digest", [](Address data, int64_t nbytes, uint64_t first_word, Address total, Address partials, Address counter, Address stream) {
    launch("digest", [&] {
      return rl_cuda_digest(at<void>(data), nbytes, first_word, at<uint64_t>(total), at<uint64_t>(partials), at<uint32_t>(counter),
                            at<void>(stream));
    });
  });
  m.def("delta_encode", [](Address fresh, Address base, int64_t size, int64_t item_bytes, Address masks, Address table, Address starts,
                           Address gaps, Address values, Address stream) {
    launch("delta_encode", [&] {
      return rl_cuda_delta_encode(at<void>(fresh), at<void>(base), size, item_bytes, at<uint32_t>(masks), at<int32_t>(table),
                                  at<int64_t>(starts), at<uint8_t>(gaps), at<void>(values), at<void>(stream));
    });
  });
  m.def("delta_apply", [](Address target, int64_t size, int64_t item_bytes, Address table, Address starts, Address gaps, Address values,
                          Address bad, Address stream) {
    launch("delta_apply", [&] {
      return rl_cuda_delta_apply(at<void>(target), size, item_bytes, at<int32_t>(table), at<int64_t>(starts), at<uint8_t>(gaps),
                                 at<void>(values), at<int32_t>(bad), at<void>(stream));
    });
  });
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of rl-csrc behind addresses, sizes and a stream. rl_csrc._impl_cuda is their only caller.";
  bind_logprobs(m);
  bind_loss(m);
  bind_estimators(m);
  bind_copies(m);
  m.def("runtime_version", [] {
    int version = 0;
    check(rl_cuda_runtime_version(&version), "runtime_version");
    return version;
  });
}
