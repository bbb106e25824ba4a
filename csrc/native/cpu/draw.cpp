// Draws of tokens from rows of logits. The numbers are a hash of the row's stream and position, so that no row depends on others.
#include <algorithm>

#include "cpu/levels.h"
#include "cpu/pool.h"
#include "cpu/rows.h"

namespace rl {
namespace {

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kFloor = -1e30f;

// SplitMix64 (Steele, Lea and Flood 2014), its state the stream advanced `position` times; 52 bits, so that u * mass < mass.
double uniform(std::int64_t stream, std::int64_t position) {
  std::uint64_t x = static_cast<std::uint64_t>(stream) + static_cast<std::uint64_t>(position) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return static_cast<double>((x ^ (x >> 31)) >> 12) * 0x1p-52;
}

}  // namespace
}  // namespace rl

using namespace rl;

extern "C" void rl_cpu_draw(const rl_logits* in, const rl_draw* draw, int threads) {
  const Level& kernels = level();
  parallel_for(in->rows, rows_per_piece(*in), threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* logits = static_cast<const float*>(in->data) + i * in->row_stride;
      const float inverse = inverse_temperature(*in, i), factor = inverse * kLog2e;
      RowStats r;
      kernels.row_stats(in, i, inverse, -1, false, false, &r);
      const bool is_greedy = draw->is_greedy && draw->is_greedy[i];
      const int64_t id = is_greedy ? kernels.row_top(logits, in->vocab, factor, r.top)
                                   : kernels.row_pick(logits, in->vocab, factor, r.top, uniform(draw->streams[i], draw->positions[i]) * r.sum);
      r.target = std::max(kFloor, logits[id] * factor);
      draw->ids[i] = id;
      draw->logprobs[i] = score(r).logprobs;
    }
  });
}
