#include "kernels_bind.h"

#include <cstring>
#include <string>
#include <vector>

namespace rl {
namespace {

std::int64_t label_count(Handle labels) {
  TensorArg arg(labels, "labels");
  arg.shaped({-1});
  return arg.size(0);
}

void check_offsets(const std::int64_t* cu, std::int64_t sequences, std::int64_t tokens, const char* name) {
  bool ordered = sequences >= 0 && cu[0] == 0 && cu[sequences] == tokens;
  for (std::int64_t b = 0; ordered && b < sequences; ++b) ordered = cu[b] <= cu[b + 1];
  if (!ordered)
    raise("ArgumentError", std::string(name) + " must start at 0, never fall, and end at the number of tokens, " + std::to_string(tokens) + ".");
}

}  // namespace

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

GradientRows gradient_rows(Handle out, Handle logits, const rl_logits& in) {
  TensorArg grad(out, "out");
  const TensorArg data(logits, "logits");
  grad.on_cpu().shaped({data.size(0), data.size(1)});
  const GradientRows g{grad.data(), rows_stride(grad), grad.size(0)};
  if (float_type(grad) != in.dtype) grad.refuse("the dtype of the logits");
  if (g.stride < in.vocab) grad.refuse("rows that do not overlap");
  return g;
}

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

std::pair<const std::int64_t*, std::int64_t> offsets(Handle cu_seqlens, const char* name, std::int64_t tokens) {
  TensorArg arg(cu_seqlens, name);
  arg.shaped({-1});
  if (arg.size(0) < 1) arg.refuse("at least one entry");
  const auto* cu = elements<std::int64_t>(cu_seqlens, name);
  check_offsets(cu, arg.size(0) - 1, tokens, name);
  return {cu, arg.size(0) - 1};
}

}  // namespace rl
