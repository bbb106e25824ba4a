// The Python face of the CUDA kernels: tensors, sizes and a stream in, a raised error out. The GIL is free during launches.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/device_arg.h"
#include "loss_spec_bind.h"
#include "rl_csrc/kernels_cuda.h"

namespace py = pybind11;

namespace {

using Arg = rl::DeviceArg;
using Stream = uintptr_t;

void* as_stream(Stream stream) { return reinterpret_cast<void*>(stream); }

// The address of the argument, which an error calls by its name here.
#define RL_AT(type, argument) (argument).as<type>(#argument)

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

// False where the sizes are not the kernel's: nothing was launched.
template <typename F>
bool launch_if_supported(const char* what, F&& f) {
  bool fits = true;
  launch(what, [&] {
    const int status = f();
    fits = status != RL_CUDA_NOT_SUPPORTED;
    return fits ? status : 0;
  });
  return fits;
}

rl_logits make_logits(const Arg& data, int64_t row_stride, int64_t vocab, int64_t rows, int dtype, const Arg& labels, const Arg& row_index,
                      const Arg& temperature, float scalar_temperature, float softcap, py::object ignore_index, int64_t vocab_start) {
  rl_logits a{};
  a.data = RL_AT(void, data);
  a.row_stride = row_stride;
  a.vocab = vocab;
  a.rows = rows;
  a.dtype = dtype;
  a.labels = RL_AT(int64_t, labels);
  a.row_index = RL_AT(int64_t, row_index);
  a.temperature = RL_AT(float, temperature);
  a.scalar_temperature = scalar_temperature;
  a.softcap = softcap;
  a.has_ignore = !ignore_index.is_none();
  a.ignore_index = a.has_ignore ? ignore_index.cast<int64_t>() : 0;
  a.vocab_start = vocab_start;
  return a;
}

rl_loss_tokens make_tokens(const Arg& old_logprobs, const Arg& advantages, const Arg& loss_mask, const Arg& ref_logprobs, const Arg& weights,
                           const Arg& denominator, float scalar_denominator, const Arg& denominators) {
  return {RL_AT(float, old_logprobs), RL_AT(float, advantages), RL_AT(uint8_t, loss_mask),
          RL_AT(float, ref_logprobs), RL_AT(float, weights),    RL_AT(float, denominator),
          scalar_denominator,         RL_AT(float, denominators)};
}

void bind_logprobs(py::module_& m) {
  py::class_<rl_logits>(m, "Logits").def(py::init(&make_logits), py::kw_only(), py::arg("data"), py::arg("row_stride"),
                                         py::arg("vocab"), py::arg("rows"), py::arg("dtype"), py::arg("labels"),
                                         py::arg("row_index"), py::arg("temperature"), py::arg("scalar_temperature"),
                                         py::arg("softcap"), py::arg("ignore_index"), py::arg("vocab_start"));
  m.def("logprobs", [](const rl_logits& a, const Arg& logprobs, const Arg& entropy, const Arg& square, const Arg& lse, Stream stream) {
    const rl_logprobs_out out{RL_AT(float, logprobs), RL_AT(float, entropy), RL_AT(float, square), RL_AT(float, lse)};
    launch("logprobs", [&] { return rl_cuda_logprobs(&a, &out, as_stream(stream)); });
  });
  m.def("logprob_stats", [](const rl_logits& a, const Arg& stats, Stream stream) {
    launch("logprob_stats", [&] { return rl_cuda_logprob_stats(&a, RL_AT(float, stats), as_stream(stream)); });
  });
  m.def("stats_merge", [](const Arg& stats, int64_t world, int64_t rows, const Arg& logprobs, const Arg& entropy, const Arg& square, const Arg& lse,
                          Stream stream) {
    const rl_logprobs_out out{RL_AT(float, logprobs), RL_AT(float, entropy), RL_AT(float, square), RL_AT(float, lse)};
    launch("stats_merge", [&] { return rl_cuda_stats_merge(RL_AT(float, stats), world, rows, &out, as_stream(stream)); });
  });
  m.def("zero_rows", [](const Arg& data, int dtype, int64_t row_stride, int64_t rows, int64_t vocab, const Arg& is_scored, Stream stream) {
    launch("zero_rows", [&] {
      return rl_cuda_zero_rows(RL_AT(void, data), dtype, row_stride, rows, vocab, RL_AT(uint8_t, is_scored), as_stream(stream));
    });
  });
  m.def("logprobs_backward", [](const rl_logits& a, const Arg& logprobs, const Arg& lse, const Arg& entropy, const Arg& grad_logprobs,
                                const Arg& grad_entropy, const Arg& grad_logits, int64_t grad_stride, int grad_dtype, Stream stream) {
    rl_logprobs_grad g{};
    g.logprobs = RL_AT(float, logprobs);
    g.lse = RL_AT(float, lse);
    g.entropy = RL_AT(float, entropy);
    g.grad_logprobs = RL_AT(float, grad_logprobs);
    g.grad_entropy = RL_AT(float, grad_entropy);
    g.grad_logits = RL_AT(void, grad_logits);
    g.grad_stride = grad_stride;
    launch("logprobs_backward", [&] { return rl_cuda_logprobs_backward(&a, &g, grad_dtype, as_stream(stream)); });
  });
}

void bind_loss(py::module_& m) {
  rl::bind_loss_spec(m);
  py::class_<rl_loss_tokens>(m, "LossTokens")
      .def(py::init(&make_tokens), py::kw_only(), py::arg("old_logprobs"), py::arg("advantages"), py::arg("loss_mask"),
           py::arg("ref_logprobs"), py::arg("weights"), py::arg("denominator"), py::arg("scalar_denominator"),
           py::arg("denominators"));
  m.def("policy_loss_partials", [](const rl_loss_spec& s, int64_t tokens, int64_t sequences) {
    return rl_cuda_policy_loss_partials(&s, tokens, sequences);
  });
  m.def("policy_loss", [](const rl_loss_spec& s, const rl_loss_tokens& t, const Arg& logprobs, const Arg& entropy, const Arg& cu_seqlens,
                          int64_t tokens, int64_t sequences, const Arg& loss, const Arg& metrics, const Arg& grad_logprobs,
                          const Arg& grad_entropy, const Arg& partials, const Arg& counter, Stream stream) {
    const rl_loss_io io{RL_AT(float, logprobs), RL_AT(float, entropy),       RL_AT(int64_t, cu_seqlens), tokens,
                        sequences,           RL_AT(float, loss),          RL_AT(float, metrics),      RL_AT(float, grad_logprobs),
                        RL_AT(float, grad_entropy), RL_AT(float, partials), RL_AT(uint32_t, counter)};
    launch("policy_loss", [&] { return rl_cuda_policy_loss(&s, &t, &io, as_stream(stream)); });
  });
}

void bind_estimators(py::module_& m) {
  m.def("scan_reverse", [](const Arg& rewards, const Arg& values, const Arg& loss_mask, const Arg& rho, const Arg& lam, const Arg& bootstrap_values,
                           const Arg& cu_seqlens, int64_t sequences, float scalar_lam, float gamma, float rho_clip, float c_clip,
                           int kind, int mask_mode, const Arg& advantages, const Arg& returns, Stream stream) {
    rl_device_scan s{};
    s.rewards = RL_AT(float, rewards);
    s.values = RL_AT(float, values);
    s.loss_mask = RL_AT(uint8_t, loss_mask);
    s.rho = RL_AT(float, rho);
    s.lam = RL_AT(float, lam);
    s.bootstrap_values = RL_AT(float, bootstrap_values);
    s.cu_seqlens = RL_AT(int64_t, cu_seqlens);
    s.sequences = sequences;
    s.scalar_lam = scalar_lam;
    s.gamma = gamma;
    s.rho_clip = rho_clip;
    s.c_clip = c_clip;
    s.kind = kind;
    s.mask_mode = mask_mode;
    s.advantages = RL_AT(float, advantages);
    s.returns = RL_AT(float, returns);
    launch("scan_reverse", [&] { return rl_cuda_scan_reverse(&s, as_stream(stream)); });
  });
  m.def("group_norm", [](const Arg& rewards, const Arg& group_ids, const Arg& cu_groups, int64_t rows, int64_t groups, int mode, double eps,
                         const Arg& advantages, Stream stream) {
    launch("group_norm", [&] {
      return rl_cuda_group_norm(RL_AT(float, rewards), RL_AT(int64_t, group_ids), RL_AT(int64_t, cu_groups), rows, groups, mode, eps,
                                RL_AT(float, advantages), as_stream(stream));
    });
  });
  m.def("moments_blocks", &rl_cuda_moments_blocks);
  m.def("masked_moments", [](const Arg& x, const Arg& mask, int64_t size, const Arg& moments, const Arg& partials, const Arg& counter, Stream stream) {
    launch("masked_moments", [&] {
      return rl_cuda_masked_moments(RL_AT(float, x), RL_AT(uint8_t, mask), size, RL_AT(double, moments), RL_AT(double, partials),
                                    RL_AT(uint32_t, counter), as_stream(stream));
    });
  });
  m.def("whiten", [](const Arg& x, const Arg& mask, int64_t size, const Arg& moments, bool shift_mean, double eps, const Arg& out, Stream stream) {
    launch("whiten", [&] {
      return rl_cuda_whiten(RL_AT(float, x), RL_AT(uint8_t, mask), size, RL_AT(double, moments), shift_mean, eps, RL_AT(float, out),
                            as_stream(stream));
    });
  });
}

void bind_inference(py::module_& m) {
  m.def("paged_splits", &rl_cuda_paged_splits);
  // False where keys have a size that the kernel does not know: nothing was done.
  m.def("paged_attention", [](const Arg& query, const Arg& key, const Arg& value, const Arg& key_cache, const Arg& value_cache, const Arg& block_tables,
                              const Arg& rows, const Arg& positions, const Arg& sinks, const Arg& partial, const Arg& stats, const Arg& out,
                              py::tuple sizes, double scaling, double softcap, int page_shift, int dtype, Stream stream) {
    const auto size = [&](int i) { return sizes[size_t(i)].cast<int64_t>(); };
    const rl_device_attention a{RL_AT(void, query), RL_AT(void, key), RL_AT(void, value), RL_AT(void, key_cache), RL_AT(void, value_cache),
                               RL_AT(void, out), RL_AT(int64_t, block_tables), RL_AT(int64_t, rows), RL_AT(int64_t, positions),
                               RL_AT(float, sinks), RL_AT(float, partial), RL_AT(float, stats),
                               size(0), size(1), size(2), size(3), size(4), size(5), size(6), size(7),
                               float(scaling), float(softcap), page_shift, dtype};
    return launch_if_supported("paged_attention", [&] { return rl_cuda_paged_attention(&a, as_stream(stream)); });
  });
  m.def("add_norm", [](const Arg& x, const Arg& residual, const Arg& weight, const Arg& out, int64_t tokens, int64_t size, double eps, int dtype,
                       Stream stream) {
    const rl_device_add_norm a{RL_AT(void, x), RL_AT(void, residual), RL_AT(void, weight), RL_AT(void, out), tokens, size, float(eps), dtype};
    launch("add_norm", [&] { return rl_cuda_add_norm(&a, as_stream(stream)); });
  });
  m.def("rotate", [](const Arg& qkv, const Arg& query_norm, const Arg& key_norm, const Arg& cos, const Arg& sin, const Arg& query,
                     const Arg& key_cache, const Arg& value_cache, const Arg& block_tables, const Arg& rows, const Arg& positions, py::tuple sizes,
                     double eps, int dtype, Stream stream) {
    const auto size = [&](int i) { return sizes[size_t(i)].cast<int64_t>(); };
    const rl_device_rotate a{RL_AT(void, qkv), RL_AT(void, query_norm), RL_AT(void, key_norm), RL_AT(void, cos), RL_AT(void, sin),
                             RL_AT(void, query), RL_AT(void, key_cache), RL_AT(void, value_cache), RL_AT(int64_t, block_tables),
                             RL_AT(int64_t, rows), RL_AT(int64_t, positions), size(0), size(1), size(2), size(3), size(4), size(5), float(eps), dtype};
    return launch_if_supported("rotate", [&] { return rl_cuda_rotate(&a, as_stream(stream)); });
  });
  m.def("gate", [](const Arg& gate_up, const Arg& out, int64_t tokens, int64_t size, int dtype, Stream stream) {
    return launch_if_supported("gate", [&] { return rl_cuda_gate(RL_AT(void, gate_up), RL_AT(void, out), tokens, size, dtype, as_stream(stream)); });
  });
  m.def("draw", [](const Arg& logits, int64_t row_stride, int64_t vocab, int64_t rows, int dtype, const Arg& temperature, const Arg& streams,
                   const Arg& positions, const Arg& is_greedy, const Arg& ids, const Arg& logprobs, Stream stream) {
    const rl_device_draw a{RL_AT(void, logits), RL_AT(float, temperature), RL_AT(int64_t, streams), RL_AT(int64_t, positions), RL_AT(uint8_t, is_greedy),
                    RL_AT(int64_t, ids), RL_AT(float, logprobs), rows, vocab, row_stride, dtype};
    return launch_if_supported("draw", [&] { return rl_cuda_draw(&a, as_stream(stream)); });
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
  void run(Stream stream) const {
    launch("bucket_copy", [&] {
      return rl_cuda_bucket_copy(sources.data(), destinations.data(), nbytes.data(), int64_t(sources.size()), as_stream(stream));
    });
  }
};

void bind_copies(py::module_& m) {
  py::class_<CopyPlan>(m, "CopyPlan")
      .def(py::init<std::vector<uint64_t>, std::vector<uint64_t>, std::vector<uint64_t>>(), py::arg("sources"), py::arg("destinations"),
           py::arg("nbytes"))
      .def("run", &CopyPlan::run, py::arg("stream"));
  m.def("digest_many", [](const std::vector<uint64_t>& data, const std::vector<uint64_t>& nbytes, const Arg& totals, Stream stream) {
    if (data.size() != nbytes.size()) throw std::invalid_argument("digest_many: as many addresses as sizes are wanted.");
    launch("digest_many", [&] {
      return rl_cuda_digest_many(data.data(), nbytes.data(), int64_t(data.size()), RL_AT(uint64_t, totals), as_stream(stream));
    });
  });
  m.def("digest_blocks", &rl_cuda_digest_blocks);
  m.def("digest", [](const Arg& data, int64_t nbytes, uint64_t first_word, const Arg& total, const Arg& partials, const Arg& counter, Stream stream) {
    launch("digest", [&] {
      return rl_cuda_digest(RL_AT(void, data), nbytes, first_word, RL_AT(uint64_t, total), RL_AT(uint64_t, partials), RL_AT(uint32_t, counter),
                            as_stream(stream));
    });
  });
  m.def("delta_encode", [](const Arg& fresh, const Arg& base, int64_t size, int64_t item_bytes, const Arg& masks, const Arg& table, const Arg& starts,
                           const Arg& gaps, const Arg& values, Stream stream) {
    launch("delta_encode", [&] {
      return rl_cuda_delta_encode(RL_AT(void, fresh), RL_AT(void, base), size, item_bytes, RL_AT(uint32_t, masks), RL_AT(int32_t, table),
                                  RL_AT(int64_t, starts), RL_AT(uint8_t, gaps), RL_AT(void, values), as_stream(stream));
    });
  });
  m.def("delta_apply", [](const Arg& target, int64_t size, int64_t item_bytes, const Arg& table, const Arg& starts, const Arg& gaps, const Arg& values,
                          const Arg& bad, Stream stream) {
    launch("delta_apply", [&] {
      return rl_cuda_delta_apply(RL_AT(void, target), size, item_bytes, RL_AT(int32_t, table), RL_AT(int64_t, starts), RL_AT(uint8_t, gaps),
                                 RL_AT(void, values), RL_AT(int32_t, bad), as_stream(stream));
    });
  });
}

void bind_mapped(py::module_& m) {
  m.def("map_granularity", [](int device) {
    uint64_t nbytes = 0;
    check(rl_cuda_map_granularity(device, &nbytes), "map_granularity");
    return nbytes;
  });
  m.def("map_reserve", [](uint64_t nbytes) {
    uint64_t address = 0;
    check(rl_cuda_map_reserve(nbytes, &address), "map_reserve");
    return address;
  });
  // None where the device has not that much memory.
  m.def("map_take", [](int device, uint64_t address, uint64_t nbytes) -> std::optional<uint64_t> {
    uint64_t handle = 0;
    const int status = rl_cuda_map_take(device, address, nbytes, &handle);
    if (status == RL_CUDA_OUT_OF_MEMORY) return std::nullopt;
    check(status, "map_take");
    return handle;
  });
  m.def("map_give", [](uint64_t address, uint64_t nbytes, uint64_t handle) { check(rl_cuda_map_give(address, nbytes, handle), "map_give"); });
  m.def("map_free", [](uint64_t address, uint64_t nbytes) { check(rl_cuda_map_free(address, nbytes), "map_free"); });
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of rl-csrc behind tensors, sizes and a stream. rl_csrc.cuda is their only caller.";
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const rl::Refused& refused) {
      const py::object type = py::module_::import("rl_csrc.errors").attr("ArgumentError");
      PyErr_SetString(type.ptr(), refused.what());
    }
  });
  bind_logprobs(m);
  bind_loss(m);
  bind_estimators(m);
  bind_inference(m);
  bind_copies(m);
  bind_mapped(m);
  m.def("runtime_version", [] {
    int version = 0;
    check(rl_cuda_runtime_version(&version), "runtime_version");
    return version;
  });
}
