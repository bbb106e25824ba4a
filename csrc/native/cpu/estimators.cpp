// Backward recurrences, group statistics and whitening. Carried in float64.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "cpu/pool.h"
#include "rl_csrc/kernels.h"

namespace rl {
namespace {

enum Kind : std::int32_t { kGae, kReturns, kTdLambda, kVtrace };
enum MaskMode : std::int32_t { kHold, kCompress, kZero, kNone };
constexpr int kAbreast = 4;

// What is carried from a token to the one before it.
struct Carry {
  double trace = 0, next_return = 0, next_value = 0;
  double advantage = 0;  // what a held token shows, where that is not the trace
};

struct Factors {
  double gamma, trace, rho_clip, c_clip;
};

// a where `on`, else b, without a branch: what stands at a masked-out token is computed and dropped, NaN included.
inline double pick(std::int64_t on, double a, double b) {
#if defined(__SSE2__)
  const __m128d m = _mm_castsi128_pd(_mm_cvtsi64_si128(-on));
  return _mm_cvtsd_f64(_mm_or_pd(_mm_and_pd(m, _mm_set_sd(a)), _mm_andnot_pd(m, _mm_set_sd(b))));
#else
  return on ? a : b;
#endif
}

struct Step {
  double trace, next_return, next_value, advantage;
};

template <Kind kind, bool kRho>
inline __attribute__((always_inline)) Step advance(const rl_scan& in, const Factors& f, std::int64_t t, const Carry& c) {
  const double r = in.rewards[t], v = in.values ? in.values[t] : 0;
  if constexpr (kind == kReturns) {
    const double g = r + f.gamma * c.next_return;
    return {0, g, 0, g - v};
  } else if constexpr (kind == kVtrace) {
    const double rho = kRho ? in.rho[t] : 1.0, bound = std::min(rho, f.rho_clip);
    const double trace = bound * (r + f.gamma * c.next_value - v) + f.trace * std::min(rho, f.c_clip) * c.trace;
    return {trace, v + trace, v, bound * (r + f.gamma * c.next_return - v)};
  } else {
    const double trace = (r + f.gamma * c.next_value - v) + f.trace * c.trace;
    return {trace, v + trace, v, trace};
  }
}

template <Kind kind, bool kRho, MaskMode mode>
inline __attribute__((always_inline)) void step(const rl_scan& in, const Factors& f, std::int64_t t, Carry& c, float* advantages,
                                                float* returns) {
  const Step s = advance<kind, kRho>(in, f, t, c);
  if constexpr (mode == kNone) {
    c.trace = s.trace, c.next_return = s.next_return, c.next_value = s.next_value;
    advantages[t] = static_cast<float>(s.advantage);
    returns[t] = static_cast<float>(s.next_return);
  } else {
    const std::int64_t on = in.mask[t] != 0;
    c.trace = pick(on, s.trace, mode == kZero ? 0 : c.trace);
    c.next_return = pick(on, s.next_return, mode == kZero ? 0 : c.next_return);
    c.next_value = pick(on, s.next_value, mode == kZero ? 0 : c.next_value);
    if constexpr (mode != kHold) {
      advantages[t] = static_cast<float>(pick(on, s.advantage, 0));
      returns[t] = static_cast<float>(pick(on, s.next_return, 0));
    } else {
      constexpr bool kOfTrace = kind == kGae || kind == kTdLambda;  // both outputs follow from what is carried anyway
      c.advantage = kOfTrace ? c.trace : pick(on, s.advantage, c.advantage);
      advantages[t] = static_cast<float>(c.advantage);
      returns[t] = static_cast<float>(kOfTrace ? c.next_value + c.trace : c.next_return);
    }
  }
}

Carry start(const rl_scan& in, std::int64_t sequence) {
  Carry c;
  if (in.bootstrap) c.next_return = c.next_value = in.bootstrap[sequence];
  return c;
}

Factors factors(const rl_scan& in, std::int64_t sequence) {
  return {in.gamma, in.gamma * (in.lam ? in.lam[sequence] : in.scalar_lam), in.rho_clip, in.c_clip};
}

template <Kind kind, bool kRho, MaskMode mode>
void scan_one(const rl_scan& in, std::int64_t k, float* advantages, float* returns) {
  Carry c = start(in, k);
  const Factors f = factors(in, k);
  for (std::int64_t t = in.cu_seqlens[k + 1]; t-- > in.cu_seqlens[k];) step<kind, kRho, mode>(in, f, t, c, advantages, returns);
}

// Several sequences abreast hide the latency of each one's chain. Every sequence does the same arithmetic as alone.
template <Kind kind, bool kRho, MaskMode mode>
void scan_abreast(const rl_scan& in, std::int64_t first, float* advantages, float* returns) {
  Carry c[kAbreast];
  Factors f[kAbreast];
  std::int64_t end[kAbreast], shortest = INT64_MAX;
  for (int w = 0; w < kAbreast; ++w) {
    c[w] = start(in, first + w);
    f[w] = factors(in, first + w);
    end[w] = in.cu_seqlens[first + w + 1];
    shortest = std::min(shortest, end[w] - in.cu_seqlens[first + w]);
  }
  for (std::int64_t j = 1; j <= shortest; ++j)
    for (int w = 0; w < kAbreast; ++w) step<kind, kRho, mode>(in, f[w], end[w] - j, c[w], advantages, returns);
  for (int w = 0; w < kAbreast; ++w)
    for (std::int64_t t = end[w] - shortest; t-- > in.cu_seqlens[first + w];)
      step<kind, kRho, mode>(in, f[w], t, c[w], advantages, returns);
}

template <Kind kind, bool kRho, MaskMode mode>
void scan_range(const rl_scan& in, std::int64_t begin, std::int64_t end, float* advantages, float* returns) {
  for (; begin + kAbreast <= end; begin += kAbreast) scan_abreast<kind, kRho, mode>(in, begin, advantages, returns);
  for (; begin < end; ++begin) scan_one<kind, kRho, mode>(in, begin, advantages, returns);
}

template <Kind kind, bool kRho = false>
void scan_all(const rl_scan& in, float* advantages, float* returns, int threads) {
  constexpr std::int64_t kPieceTokens = 1 << 14;
  const std::int64_t total = in.cu_seqlens[in.sequences];
  const std::int64_t grain = (kPieceTokens / (total / std::max<std::int64_t>(in.sequences, 1) + 1) / kAbreast + 1) * kAbreast;
  parallel_for(in.sequences, grain, threads, [&](std::int64_t begin, std::int64_t end) {
    switch (in.mask ? static_cast<MaskMode>(in.mask_mode) : kNone) {
      case kHold: return scan_range<kind, kRho, kHold>(in, begin, end, advantages, returns);
      case kCompress: return scan_range<kind, kRho, kCompress>(in, begin, end, advantages, returns);
      case kZero: return scan_range<kind, kRho, kZero>(in, begin, end, advantages, returns);
      default: return scan_range<kind, kRho, kNone>(in, begin, end, advantages, returns);
    }
  });
}

// Position of each reward's group in order of first appearance: an open-addressed table of the ids.
std::int64_t dense_groups(const std::int64_t* ids, std::int64_t size, std::vector<std::int32_t>& dense) {
  std::size_t slots = 16;
  while (slots < static_cast<std::size_t>(size) * 2) slots *= 2;
  std::vector<std::int32_t> table(slots, -1);
  std::vector<std::int64_t> known;
  for (std::int64_t i = 0; i < size; ++i) {
    std::size_t at = (static_cast<std::uint64_t>(ids[i]) * 0x9E3779B97F4A7C15ull >> 20) & (slots - 1);
    while (table[at] >= 0 && known[static_cast<std::size_t>(table[at])] != ids[i]) at = (at + 1) & (slots - 1);
    if (table[at] < 0) {
      table[at] = static_cast<std::int32_t>(known.size());
      known.push_back(ids[i]);
    }
    dense[static_cast<std::size_t>(i)] = table[at];
  }
  return static_cast<std::int64_t>(known.size());
}

struct Group {
  double first = 0, shifted_sum = 0, square = 0;
  std::int64_t count = 0;
};

constexpr std::int64_t kMomentBlock = 4096;  // blocks are summed in order, so the threads do not matter

template <class Body>
double blocked_sum(std::int64_t size, int threads, const Body& body) {
  const std::int64_t blocks = (size + kMomentBlock - 1) / kMomentBlock;
  std::vector<double> parts(static_cast<std::size_t>(blocks));
  parallel_for(blocks, 8, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b)
      parts[static_cast<std::size_t>(b)] = body(b * kMomentBlock, std::min(size, (b + 1) * kMomentBlock));
  });
  double total = 0;
  for (const double part : parts) total += part;
  return total;
}

}  // namespace
}  // namespace rl

using namespace rl;

extern "C" void rl_cpu_scan_reverse(const rl_scan* in, float* advantages, float* returns, int threads) {
  switch (in->kind) {
    case kGae: return scan_all<kGae>(*in, advantages, returns, threads);
    case kReturns: return scan_all<kReturns>(*in, advantages, returns, threads);
    case kTdLambda: return scan_all<kTdLambda>(*in, advantages, returns, threads);
    default:
      return in->rho ? scan_all<kVtrace, true>(*in, advantages, returns, threads) : scan_all<kVtrace>(*in, advantages, returns, threads);
  }
}

extern "C" void rl_cpu_group_norm(const float* rewards, const int64_t* group_ids, const int64_t* cu_groups, int64_t size,
                                  int64_t num_groups, int mode, double eps, float* out) {
  enum { kGrpo, kDrGrpo, kRloo };
  std::vector<int32_t> dense(static_cast<size_t>(size));
  if (group_ids) {
    num_groups = dense_groups(group_ids, size, dense);
  } else {
    for (int64_t g = 0; g < num_groups; ++g) std::fill(dense.begin() + cu_groups[g], dense.begin() + cu_groups[g + 1], static_cast<int32_t>(g));
  }
  std::vector<Group> groups(static_cast<size_t>(num_groups));
  const auto group_of = [&](int64_t i) -> Group& { return groups[static_cast<size_t>(dense[static_cast<size_t>(i)])]; };
  for (int64_t i = 0; i < size; ++i) {
    Group& g = group_of(i);
    if (g.count++ == 0) g.first = rewards[i];
    g.shifted_sum += rewards[i] - g.first;  // exactly 0 where rewards are equal
  }
  for (Group& g : groups) g.shifted_sum /= static_cast<double>(std::max<int64_t>(g.count, 1));
  for (int64_t i = 0; i < size; ++i) {
    Group& g = group_of(i);
    const double centred = rewards[i] - g.first - g.shifted_sum;
    g.square += centred * centred;
  }
  for (Group& g : groups) g.square = 1 / (std::sqrt(g.square / static_cast<double>(std::max<int64_t>(g.count - 1, 1))) + eps);
  for (int64_t i = 0; i < size; ++i) {
    const Group& g = group_of(i);
    const double centred = rewards[i] - g.first - g.shifted_sum;
    if (mode == kGrpo)
      out[i] = g.count == 1 ? rewards[i] : static_cast<float>(centred * g.square);
    else if (mode == kRloo)
      out[i] = static_cast<float>(centred * static_cast<double>(g.count) / static_cast<double>(std::max<int64_t>(g.count - 1, 1)));
    else
      out[i] = static_cast<float>(centred);
  }
}

extern "C" void rl_cpu_masked_moments(const float* x, const uint8_t* mask, int64_t size, double* out, int threads) {
  const auto counted = [&](int64_t i) { return !mask || mask[i]; };
  const double count = mask ? blocked_sum(size, threads,
                                          [&](int64_t begin, int64_t end) {
                                            int64_t n = 0;
                                            for (int64_t i = begin; i < end; ++i) n += mask[i] != 0;
                                            return static_cast<double>(n);
                                          })
                            : static_cast<double>(size);
  const double sum = blocked_sum(size, threads, [&](int64_t begin, int64_t end) {
    double lanes[8] = {};
    for (int64_t i = begin; i < end; ++i) lanes[i & 7] += counted(i) ? static_cast<double>(x[i]) : 0.0;
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
  });
  const double mean = sum / std::max(count, 1.0);
  const double m2 = blocked_sum(size, threads, [&](int64_t begin, int64_t end) {
    double lanes[8] = {};
    for (int64_t i = begin; i < end; ++i) {
      const double d = counted(i) ? x[i] - mean : 0.0;
      lanes[i & 7] += d * d;
    }
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
  });
  out[0] = count, out[1] = mean, out[2] = m2;
}

extern "C" void rl_cpu_whiten(const float* x, const uint8_t* mask, int64_t size, double mean, double scale, double shift, float* out,
                              int threads) {
  parallel_for(size, 1 << 15, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = !mask || mask[i] ? static_cast<float>((x[i] - mean) * scale + shift) : 0.0f;
  });
}

extern "C" void rl_cpu_copy_spans(const void* const* sources, void* const* destinations, const int64_t* nbytes, int64_t num,
                                  int threads) {
  int64_t total = 0;
  for (int64_t i = 0; i < num; ++i) total += nbytes[i];
  constexpr int64_t kPieceBytes = 1 << 20;
  if (threads <= 1 || total < 2 * kPieceBytes) {
    for (int64_t i = 0; i < num; ++i) std::memcpy(destinations[i], sources[i], static_cast<size_t>(nbytes[i]));
    return;
  }
  // A span's bytes are numbered through, so that one large tensor is shared by the threads as well.
  std::vector<int64_t> starts(static_cast<size_t>(num) + 1, 0);
  for (int64_t i = 0; i < num; ++i) starts[static_cast<size_t>(i) + 1] = starts[static_cast<size_t>(i)] + nbytes[i];
  parallel_for(total, kPieceBytes, threads, [&](int64_t begin, int64_t end) {
    auto span = static_cast<int64_t>(std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin()) - 1;
    while (begin < end) {
      const int64_t offset = begin - starts[static_cast<size_t>(span)];
      const int64_t n = std::min(end - begin, nbytes[span] - offset);
      std::memcpy(static_cast<char*>(destinations[span]) + offset, static_cast<const char*>(sources[span]) + offset, static_cast<size_t>(n));
      begin += n;
      ++span;
    }
  });
}

extern "C" uint64_t rl_cpu_read_floor(const void* data, int64_t nbytes) {
  const auto* p = static_cast<const uint64_t*>(data);
  uint64_t lanes[16] = {};
  for (int64_t i = 0; i + 16 <= nbytes / 8; i += 16)
    for (int j = 0; j < 16; ++j) lanes[j] += p[i + j];
  uint64_t sum = 0;
  for (const uint64_t lane : lanes) sum += lane;
  return sum;
}

extern "C" void rl_cpu_rewrite_floor(void* data, int64_t nbytes) {
  auto* p = static_cast<uint64_t*>(data);
  for (int64_t i = 0; i < nbytes / 8; ++i) p[i] ^= 1;
}
