// The position-keyed 64-bit digest of FRAMES.md. A sum modulo 2^64 has no order, so blocks and pieces add up to the same bits.
#include "common.cuh"
#include "launch.cuh"

namespace rl {
namespace {

constexpr uint64_t kKeyStep = 0x9E3779B97F4A7C15ull, kMultiplier = 0xD6E8FEB86659FD93ull;
constexpr int kThreads = 512;
constexpr int kUnroll = 4;
constexpr int64_t kMaxBlocks = 132 * 8;

__device__ __forceinline__ uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 32)) * kMultiplier;
  x = (x ^ (x >> 32)) * kMultiplier;
  return x ^ (x >> 32);
}

__device__ __forceinline__ uint64_t word(uint32_t lo, uint32_t hi) { return uint64_t(hi) << 32 | lo; }

__device__ __forceinline__ uint64_t mix_vec(const uint4& v, uint64_t number) {  // `number` of its first word, counted from 1
  const uint64_t key = number * kKeyStep;
  return mix(word(v.x, v.y) ^ key) + mix(word(v.z, v.w) ^ (key + kKeyStep));
}

// What the bytes behind the last whole vector add: up to two words, zero-padded.
__device__ __forceinline__ uint64_t tail_sum(const unsigned char* data, int64_t nbytes, uint64_t first_word) {
  const int64_t vecs = nbytes / 16, rest = nbytes & 15;
  if (rest == 0) return 0;
  uint32_t w[4] = {0, 0, 0, 0};
  for (int64_t j = 0; j < rest; ++j) w[j >> 2] |= uint32_t(data[vecs * 16 + j]) << (8 * (j & 3));
  const uint64_t key = (first_word + 1 + 2 * uint64_t(vecs)) * kKeyStep;
  return mix(word(w[0], w[1]) ^ key) + (rest > 8 ? mix(word(w[2], w[3]) ^ (key + kKeyStep)) : 0);
}

__global__ void __launch_bounds__(kThreads) digest_kernel(const unsigned char* data, int64_t nbytes, uint64_t first_word,
                                                          uint64_t* total, uint64_t* partials, uint32_t* counter) {
  __shared__ unsigned long long scratch[33];
  const int64_t vecs = nbytes / 16, step = int64_t(gridDim.x) * kThreads;
  const VecReader reader(data, nbytes);
  uint64_t sum = 0;
  for (int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x; first < vecs; first += step * kUnroll) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t n = first + u * step;
      if (n >= vecs) continue;
      v[u] = reader.shift == 0 ? reader.aligned(n) : reader.shifted(n);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t n = first + u * step;
      if (n < vecs) sum += mix_vec(v[u], first_word + 1 + 2 * uint64_t(n));
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) sum += tail_sum(data, nbytes, first_word);
  const uint64_t mine = block_sum<unsigned long long>(sum, scratch);
  if (threadIdx.x == 0) partials[blockIdx.x] = mine;
  if (!last_block(counter, gridDim.x)) return;
  uint64_t all = 0;
  for (unsigned b = threadIdx.x; b < gridDim.x; b += kThreads) all += __ldcg(reinterpret_cast<const unsigned long long*>(partials) + b);
  all = block_sum<unsigned long long>(all, scratch);
  if (threadIdx.x == 0) *total = all;
}

// Many pieces per launch, each a stream of its own. They travel as the launch's parameters, so that nothing has to stay alive.
constexpr int kMaxPieces = 1200;
constexpr int64_t kTile = 256 << 10;  // bytes that one block sums
struct Pieces {
  const unsigned char* data[kMaxPieces];
  uint64_t nbytes[kMaxPieces];
  uint32_t first_tile[kMaxPieces];
  uint32_t count;
};
static_assert(sizeof(Pieces) < 32700, "kernel parameters end at 32764 bytes");

__global__ void __launch_bounds__(kThreads) digest_many_kernel(RL_CONSTANT_PARAMETER(Pieces) pieces, unsigned long long* totals) {
  __shared__ unsigned long long scratch[33];
  uint32_t piece = 0;  // the last one whose first tile is not behind this block's
  for (uint32_t high = pieces.count; high - piece > 1;) {
    const uint32_t middle = (piece + high) / 2;
    (pieces.first_tile[middle] <= blockIdx.x ? piece : high) = middle;
  }
  const int64_t offset = int64_t(blockIdx.x - pieces.first_tile[piece]) * kTile;
  const unsigned char* const data = pieces.data[piece] + offset;
  const int64_t nbytes = min(kTile, int64_t(pieces.nbytes[piece]) - offset), vecs = nbytes / 16;
  const uint64_t first_word = uint64_t(offset) / 8;
  const VecReader reader(data, nbytes);
  uint64_t sum = 0;
  for (int64_t first = threadIdx.x; first < vecs; first += kThreads * kUnroll) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t n = first + u * kThreads;
      if (n >= vecs) continue;
      v[u] = reader.shift == 0 ? reader.aligned(n) : reader.shifted(n);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t n = first + u * kThreads;
      if (n < vecs) sum += mix_vec(v[u], first_word + 1 + 2 * uint64_t(n));
    }
  }
  if (threadIdx.x == 0) sum += tail_sum(data, nbytes, first_word);
  const uint64_t all = block_sum<unsigned long long>(sum, scratch);
  if (threadIdx.x == 0) atomicAdd(totals + piece, all);  // modulo 2^64, so in any order the same bits
}

}  // namespace
}  // namespace rl

extern "C" int64_t rl_cuda_digest_blocks(int64_t nbytes) {
  const int64_t blocks = rl::ceil_div(nbytes, int64_t(rl::kThreads) * 16 * rl::kUnroll);
  return blocks < 1 ? 1 : blocks < rl::kMaxBlocks ? blocks : rl::kMaxBlocks;
}

extern "C" int rl_cuda_digest(const void* data, int64_t nbytes, uint64_t first_word, uint64_t* total, uint64_t* partials,
                              uint32_t* counter, void* stream) {
  using namespace rl;
  return launch(digest_kernel, rl_cuda_digest_blocks(nbytes), kThreads, stream, static_cast<const unsigned char*>(data), nbytes, first_word,
                total, partials, counter);
}

extern "C" int rl_cuda_digest_many(const uint64_t* data, const uint64_t* nbytes, int64_t count, uint64_t* totals, void* stream) {
  using namespace rl;
  for (int64_t begin = 0; begin < count; begin += kMaxPieces) {
    Pieces pieces{};
    int64_t tiles = 0;
    pieces.count = uint32_t(count - begin < kMaxPieces ? count - begin : kMaxPieces);
    for (uint32_t i = 0; i < pieces.count; ++i) {
      pieces.data[i] = reinterpret_cast<const unsigned char*>(uintptr_t(data[begin + i]));
      pieces.nbytes[i] = nbytes[begin + i];
      pieces.first_tile[i] = uint32_t(tiles);
      tiles += ceil_div(int64_t(nbytes[begin + i]), kTile);
    }
    if (tiles == 0) continue;
    auto* const sums = reinterpret_cast<unsigned long long*>(totals + begin);
    if (const int status = launch(digest_many_kernel, tiles, kThreads, stream, pieces, sums)) return status;
  }
  return 0;
}
