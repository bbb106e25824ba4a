// The LM head on tiles: packs the tokens, cuts the work into pieces that do not depend on the threads, merges in order.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "cpu/tiles.h"
#include "cpu/pool.h"
#include "cpu/rows.h"
#include "isa.h"

namespace rl {
namespace {

constexpr double kLn2 = 0.6931471805599453;
constexpr float kLog2e = 1.44269504088896340736f;
constexpr std::int64_t kSegment = 4096;  // vocabulary rows whose statistics are kept together

std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

// Everything about the tokens that the tiles want, padded to whole pairs.
struct Tokens {
  std::int64_t padded, block;
  std::unique_ptr<std::uint16_t[]> packed;
  std::vector<float> factor;
  std::vector<std::int32_t> label;
};

// Ignored tokens and padding are packed as 0, whatever stands there.
void pack_tile(const rl_logits& in, const rl_linear& l, std::int64_t tile, std::uint16_t* out) {
  const std::int64_t steps = l.width / kTileWidth, first = tile * kTileTokens;
  bool given[kTileTokens];
  for (std::int64_t n = 0; n < kTileTokens; ++n) given[n] = first + n < in.rows && !is_ignored(in, first + n);
  for (std::int64_t k = 0; k < steps; ++k)
    for (std::int64_t pair = 0; pair < kTileWidth / 2; ++pair)
      for (std::int64_t n = 0; n < kTileTokens; ++n, out += 2) {
        if (given[n])
          std::memcpy(out, l.hidden + (first + n) * l.hidden_stride + k * kTileWidth + 2 * pair, 4);
        else
          std::memset(out, 0, 4);
      }
}

std::vector<std::int32_t> tile_labels(const rl_logits& in, std::int64_t padded) {
  std::vector<std::int32_t> labels(static_cast<std::size_t>(padded), -1);
  for (std::int64_t i = 0; i < in.rows; ++i)
    if (!is_ignored(in, i)) labels[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(local_label(in, i));
  return labels;
}

Tokens prepare(const rl_logits& in, const rl_linear& l, int threads) {
  Tokens t;
  t.padded = round_up(in.rows, kPairTokens);
  t.block = std::max(kPairTokens, tiles()->resident_bytes / (2 * l.width) / kPairTokens * kPairTokens);
  t.packed.reset(new std::uint16_t[static_cast<std::size_t>(t.padded * l.width)]);
  t.factor.assign(static_cast<std::size_t>(t.padded), 0);
  t.label = tile_labels(in, t.padded);
  parallel_for(t.padded / kTileTokens, 4, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t tile = begin; tile < end; ++tile) pack_tile(in, l, tile, t.packed.get() + tile * kTileTokens * l.width);
  });
  for (std::int64_t i = 0; i < in.rows; ++i) t.factor[static_cast<std::size_t>(i)] = inverse_temperature(in, i) * kLog2e;
  return t;
}

TileWork work_of(const rl_logits& in, const rl_linear& l, const Tokens& t, std::int64_t begin, std::int64_t first, std::int64_t last) {
  return {l.weight,   l.weight_stride, l.width, l.bias, first, last, t.packed.get() + begin * l.width, std::min(t.block, t.padded - begin),
          t.factor.data() + begin, t.label.data() + begin, in.softcap};
}

struct Stats {
  std::vector<float> top, sum, dot, square, target;
  explicit Stats(std::size_t n) : top(n, -1e30f), sum(n, 0), dot(n, 0), square(n, 0), target(n, -std::numeric_limits<float>::infinity()) {}
};

RowStats merged(const Stats& stats, std::int64_t segments, std::int64_t padded, std::int64_t token) {
  RowStats r{-1e30f, -std::numeric_limits<float>::infinity(), 0, 0, 0};
  for (std::int64_t s = 0; s < segments; ++s) r.top = std::max(r.top, stats.top[static_cast<std::size_t>(s * padded + token)]);
  for (std::int64_t s = 0; s < segments; ++s) {
    const auto at = static_cast<std::size_t>(s * padded + token);
    const double shift = static_cast<double>(stats.top[at]) - r.top, scale = shift < -1000 ? 0 : std::exp2(shift);
    r.sum += scale * stats.sum[at];
    r.dot += scale * (stats.dot[at] + (scale > 0 ? shift : 0) * stats.sum[at]);
    r.square += scale * scale * stats.square[at];
    r.target = std::max(r.target, stats.target[at]);
  }
  return r;
}

// Per token, what turns probabilities into the gradient of logits. As made: 0.
struct Factors {
  std::vector<float> lse2, a, b, at_target;

  Factors(const rl_logits& in, const rl_logprobs_grad& grad, std::int64_t padded)
      : lse2(static_cast<std::size_t>(padded), 1e30f), a(lse2.size(), 0), b(lse2.size(), 0), at_target(lse2.size(), 0) {
    for (std::int64_t i = 0; i < in.rows; ++i) {
      const float g = grad.grad_logprobs ? grad.grad_logprobs[i] : 0, entropy_g = grad.grad_entropy ? grad.grad_entropy[i] : 0;
      if (is_ignored(in, i) || std::isinf(grad.lse[i]) || (g == 0 && entropy_g == 0)) continue;
      Scored s;
      s.logprobs = grad.logprobs[i];
      s.entropy = grad.entropy ? grad.entropy[i] : 0;
      s.lse2 = static_cast<float>(grad.lse[i] / kLn2);
      const RowGradient r = row_gradient(s, inverse_temperature(in, i), g, entropy_g);
      const auto k = static_cast<std::size_t>(i);
      lse2[k] = r.lse2, a[k] = r.a, b[k] = r.b, at_target[k] = r.at_target;
    }
  }

  TileGradient at(std::int64_t token, std::uint16_t* out, std::int64_t stride) const {
    return {lse2.data() + token, a.data() + token, b.data() + token, at_target.data() + token, out, stride};
  }
};

}  // namespace
}  // namespace rl

using namespace rl;

extern "C" int rl_cpu_has_tiles(void) { return tiles() != nullptr; }

extern "C" int64_t rl_cpu_linear_logprobs(const rl_logits* in, const rl_linear* linear, const rl_logprobs_out* out, uint16_t* kept,
                                          float* kept_top, int threads) {
  if (const int64_t bad = first_bad_label(*in)) return bad;
  const Tokens t = prepare(*in, *linear, threads);
  const int64_t segments = (in->vocab + kSegment - 1) / kSegment, blocks = (t.padded + t.block - 1) / t.block;
  Stats stats(static_cast<std::size_t>(segments * t.padded));
  parallel_for(segments * blocks, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t segment = piece / blocks, token = piece % blocks * t.block, at = segment * t.padded + token;
      const int64_t first = segment * kSegment, last = std::min(first + kSegment, in->vocab);
      const TileStats s{stats.top.data() + at,    stats.sum.data() + at, stats.dot.data() + at,
                        stats.square.data() + at, stats.target.data() + at, out->entropy != nullptr,
                        out->sum_pi_squared != nullptr, kept ? kept + token : nullptr, kept ? kept_top + token : nullptr,
                        t.padded};
      tiles()->stats(work_of(*in, *linear, t, token, first, last), s);
    }
  });
  for (int64_t i = 0; i < in->rows; ++i) put(*out, i, is_ignored(*in, i) ? Scored{} : score(merged(stats, segments, t.padded, i)));
  return 0;
}

extern "C" void rl_cpu_linear_gradient(const rl_logits* in, const rl_linear* linear, const rl_logprobs_grad* grad, int64_t first,
                                       int64_t last, uint16_t* out, int threads) {
  const Tokens t = prepare(*in, *linear, threads);
  const Factors f(*in, *grad, t.padded);
  constexpr int64_t kPiece = 512;
  const int64_t pieces = (last - first + kPiece - 1) / kPiece, blocks = (t.padded + t.block - 1) / t.block;
  parallel_for(pieces * blocks, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t row = first + piece / blocks * kPiece, token = piece % blocks * t.block;
      const TileGradient g = f.at(token, out + (row - first) * t.padded + token, t.padded);
      tiles()->gradient(work_of(*in, *linear, t, token, row, std::min(row + kPiece, last)), g);
    }
  });
}

extern "C" void rl_cpu_linear_rescale(const rl_logits* in, const rl_logprobs_grad* grad, uint16_t* kept, const float* kept_top, int threads) {
  const int64_t padded = round_up(in->rows, kPairTokens);
  const Factors f(*in, *grad, padded);
  const std::vector<int32_t> labels = tile_labels(*in, padded);
  constexpr int64_t kPiece = 512;
  parallel_for((in->vocab + kPiece - 1) / kPiece, 1, threads, [&](int64_t begin, int64_t end) {
    TileWork w{};
    w.first = begin * kPiece, w.last = std::min(end * kPiece, in->vocab), w.tokens = padded, w.label = labels.data();
    tiles()->rescale(w, f.at(0, kept, padded), kept_top);
  });
}
