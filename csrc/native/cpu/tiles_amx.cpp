// The LM head on AMX tiles.
#include "cpu/tiles.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <stdint.h>

namespace rl {
namespace {
#include "cpu/vec.h"
#include "cpu/level_tanh.h"

constexpr int64_t kResidentBytes = 1400 << 10;  // in a second-level cache of 2 MB

struct __attribute__((aligned(64))) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};

  TileConfig() {
    for (int i = 0; i < 8; ++i) bytes_per_row[i] = 64, rows[i] = 16;
  }
};

struct Unit {
  Unit() {
    const TileConfig config;
    _tile_loadconfig(&config);
  }
  ~Unit() { _tile_release(); }
};

// scores[32 rows][32 tokens] of a panel of vocabulary rows and one pair of token tiles at `b`.
RL_INLINE void multiply(const uint16_t* panel, const uint16_t* b, int64_t steps, float* scores) {
  constexpr int64_t kTileElements = kTileTokens * kTileWidth;
  const uint16_t* b1 = b + steps * kTileElements;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < steps; ++k) {
    _tile_loadd(4, panel + 2 * k * kTileElements, 64);
    _tile_loadd(6, b + k * kTileElements, 64);
    _tile_loadd(5, panel + (2 * k + 1) * kTileElements, 64);
    _tile_loadd(7, b1 + k * kTileElements, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, scores, 128);
  _tile_stored(1, scores + 16, 128);
  _tile_stored(2, scores + 16 * 32, 128);
  _tile_stored(3, scores + 16 * 32 + 16, 128);
}

#include "cpu/level_tiles.h"
}  // namespace

const Tiles& tiles_amx() {
  static constexpr Tiles kernels{kResidentBytes, linear_stats, linear_gradient, linear_rescale};
  return kernels;
}

}  // namespace rl
#endif
