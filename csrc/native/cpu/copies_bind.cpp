// Copies of many tensors as a Python function, and the floors that benchmarks compare with.
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
}
}  // namespace rl
