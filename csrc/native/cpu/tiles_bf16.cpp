// The LM head by AVX-512's products of bf16 pairs, on the layout of AMX tiles.
#include "cpu/tiles.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#include <stdint.h>

namespace rl {
namespace {
#include "cpu/vec.h"
#include "cpu/level_tanh.h"

struct Unit {
  Unit() {}
};

// In the third-level cache, which feeds these products fast enough; half as much costs a tenth of the speed.
constexpr int64_t kResidentBytes = 4 << 20;
constexpr int kBlockRows = 8;    // times two vectors of tokens: 16 sums in registers, which hides the latency of a product
constexpr int64_t kBlockSteps = 8;  // steps after which the operands of all 32 rows would leave the first-level cache

// Adds the products of steps [begin, end) of kBlockRows rows at `panel` to `scores`, or puts them there.
template <bool kFirst>
RL_INLINE void multiply_block(const uint16_t* panel, const uint16_t* b0, const uint16_t* b1, int64_t begin, int64_t end, float* scores) {
  __m512 sums[kBlockRows][2];
  for (int r = 0; r < kBlockRows; ++r)
    for (int j = 0; j < 2; ++j) sums[r][j] = kFirst ? _mm512_setzero_ps() : _mm512_load_ps(scores + r * kPairTokens + j * 16);
  for (int64_t k = begin; k < end; ++k)
    for (int pair = 0; pair < kTileWidth / 2; ++pair) {
      const int64_t at = (k * kTileWidth / 2 + pair) * 32;
      const __m512bh x0 = (__m512bh)_mm512_loadu_si512(b0 + at), x1 = (__m512bh)_mm512_loadu_si512(b1 + at);
      for (int r = 0; r < kBlockRows; ++r) {
        int32_t both;
        __builtin_memcpy(&both, panel + k * kPanelRows * kTileWidth + r * kTileWidth + 2 * pair, 4);
        const __m512bh w = (__m512bh)_mm512_set1_epi32(both);
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], w, x0);
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], w, x1);
      }
    }
  for (int r = 0; r < kBlockRows; ++r)
    for (int j = 0; j < 2; ++j) _mm512_store_ps(scores + r * kPairTokens + j * 16, sums[r][j]);
}

// scores[32 rows][32 tokens] of a panel of vocabulary rows and one pair of token tiles at `b`.
RL_INLINE void multiply(const uint16_t* panel, const uint16_t* b, int64_t steps, float* scores) {
  const uint16_t* b1 = b + steps * kTileTokens * kTileWidth;
  for (int64_t k = 0; k < steps; k += kBlockSteps) {
    const int64_t end = k + kBlockSteps < steps ? k + kBlockSteps : steps;
    for (int r = 0; r < kPanelRows; r += kBlockRows) {
      if (k == 0)
        multiply_block<true>(panel + r * kTileWidth, b, b1, k, end, scores + r * kPairTokens);
      else
        multiply_block<false>(panel + r * kTileWidth, b, b1, k, end, scores + r * kPairTokens);
    }
  }
}

#include "cpu/level_tiles.h"
}  // namespace

const Tiles& tiles_bf16() {
  static constexpr Tiles kernels{kResidentBytes, linear_stats, linear_gradient, linear_rescale};
  return kernels;
}

}  // namespace rl
#endif
