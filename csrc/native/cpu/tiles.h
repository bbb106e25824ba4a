// The LM head on tiles: products of bf16 rows in float32, consumed where they arise. See level_tiles.h.
#pragma once
#include <cstdint>

namespace rl {

constexpr std::int64_t kTileTokens = 16;  // tokens of one tile of packed hidden states
constexpr std::int64_t kTileWidth = 32;   // hidden columns of one
constexpr std::int64_t kPairTokens = 2 * kTileTokens;
constexpr int kPanelRows = 32;  // vocabulary rows of one step: two tiles

// A run of vocabulary rows against a block of tokens. Per-token arrays have one entry per token, padded to whole pairs.
struct TileWork {
  const std::uint16_t* weight;  // row 0 of the vocabulary
  std::int64_t weight_stride, width;
  const float* bias;            // optional
  std::int64_t first, last;     // vocabulary rows
  const std::uint16_t* packed;  // [token tiles][width / 32][16 column pairs][16 tokens][2]
  std::int64_t tokens;          // a multiple of kPairTokens
  const float* factor;          // log2(e) / temperature
  const std::int32_t* label;    // vocabulary row of each token's label; -1: none
  float softcap;                // 0: none
};

// Running statistics per token, in units of log 2.
struct TileStats {
  float *top, *sum, *dot, *square, *target;
  bool wants_dot, wants_square;
  // Where exp2(scaled logit - maximum so far) is kept in bf16, and that maximum for each 32 vocabulary rows; or nullptr. Both
  // start at vocabulary row 0 and have `stride` tokens to a row. Then no squares are summed.
  std::uint16_t* kept;
  float* kept_top;
  std::int64_t stride;
};

// Gradient factors per token, and where the gradient goes: [last - first, stride] bf16, transposed (a row per vocabulary row).
struct TileGradient {
  const float *lse2, *a, *b, *at_target;
  std::uint16_t* out;
  std::int64_t stride;
};

struct Tiles {
  // Packed tokens that stay in cache while panels of weights pass: more of them share the packing of a panel.
  std::int64_t resident_bytes;
  void (*stats)(const TileWork& work, const TileStats& stats);
  void (*gradient)(const TileWork& work, const TileGradient& gradient);
  // Turns what the statistics kept for vocabulary rows [first, last) into their gradient, in place: no product is made again.
  // `gradient.out` is the kept values of row 0; no softcap, no entropy term.
  void (*rescale)(const TileWork& work, const TileGradient& gradient, const float* kept_top);
};

const Tiles& tiles_amx();
const Tiles& tiles_bf16();

const Tiles* tiles();  // of the level in force; nullptr below bf16 products

}  // namespace rl
