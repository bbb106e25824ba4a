// Ragged copies as Python functions, and the floors that benchmarks compare with.
#include <cstdlib>
#include <string>
#include <vector>

#include "bindings.h"
#include "kernels_bind.h"

namespace py = pybind11;

namespace rl {
namespace {

constexpr std::uint8_t kComplex = 5;  // DLPack's code

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

// Whether a tensor's bytes are its values: complex ones may be conjugated lazily, and the imaginary part of one negated.
bool is_plain(const TensorArg& arg, Handle tensor) { return arg.contiguous() && arg.dtype().code != kComplex && !is_negated(tensor.ptr()); }

// Copies what it can (plain, same type and shape) and returns the positions of the pairs it left.
py::list bucket_copy(const py::list& sources, const py::list& destinations, int threads) {
  Spans spans;
  py::list left;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const TensorArg source(sources[i], "a source"), destination(destinations[i], "a destination");
    bool same = source.ndim() == destination.ndim();
    for (int d = 0; same && d < source.ndim(); ++d) same = source.size(d) == destination.size(d);
    if (!same) destination.refuse("the shape of its source, " + source.describe());
    const bool alike = source.dtype().code == destination.dtype().code && source.dtype().bits == destination.dtype().bits;
    if (!alike || !is_plain(source, sources[i]) || !is_plain(destination, destinations[i])) {
      left.append(i);
      continue;
    }
    const std::int64_t apart = static_cast<char*>(destination.data()) - static_cast<char*>(source.data());
    if (apart != 0 && std::abs(apart) < source.nbytes()) destination.refuse("memory that does not overlap its source");
    spans.add(source.data(), destination.data(), apart ? source.nbytes() : 0);
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

void bind_copies(py::module_& m) {
  m.def("read_floor", &read_floor, "Read a tensor's bytes once: the limit of benchmarks.");
  m.def("rewrite_floor", &rewrite_floor, "Read and write a tensor's bytes once, in place: the limit of benchmarks.");
  m.def("bucket_copy", &bucket_copy);
  m.def("pack", &pack);
  m.def("cp_slice", &cp_slice);
  m.def("roll_labels", &roll_labels);
}
}  // namespace rl
