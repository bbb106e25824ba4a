// Byte copies of many pieces per launch: bucket packing, ragged rows, context-parallel slices, label shifts.
//
// A warp moves one tile of the output. It writes whole 16-byte vectors; where source and destination are aligned differently it
// reads the two vectors around each and shifts.
#include "common.cuh"
#include "launch.cuh"

namespace rl {
namespace {

constexpr int kWarps = 8;
constexpr int64_t kWarpTile = 8192;  // bytes of output
constexpr int kUnroll = 4;

__device__ __forceinline__ void copy_bytes(char* dst, const char* src, int64_t size) {
  const int lane = threadIdx.x & 31;
  int64_t head = int64_t((16 - (reinterpret_cast<uintptr_t>(dst) & 15)) & 15);
  if (head > size) head = size;
  if (lane < head) dst[lane] = src[lane];
  dst += head, src += head, size -= head;
  const int64_t vecs = size / 16;
  const unsigned shift = unsigned(reinterpret_cast<uintptr_t>(src) & 15);
  if (shift == 0) {
    for (int64_t first = lane; first < vecs; first += 32 * kUnroll) {
      uint4 v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (first + u * 32 < vecs) v[u] = load_stream(src + (first + u * 32) * 16);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (first + u * 32 < vecs) store_stream(dst + (first + u * 32) * 16, v[u]);
    }
  } else {
    const VecReader reader(src, size);
    for (int64_t first = lane; first < vecs; first += 32 * kUnroll) {
      uint4 v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (first + u * 32 < vecs) v[u] = reader.shifted(first + u * 32);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (first + u * 32 < vecs) store_stream(dst + (first + u * 32) * 16, v[u]);
    }
  }
  const int64_t tail = vecs * 16 + lane;
  if (tail < size) dst[tail] = src[tail];
}

// Index of the last entry of the ascending array that is <= x, where entry 0 is.
template <typename Array>
__device__ __forceinline__ int64_t last_at_most(const Array& ascending, int64_t size, int64_t x) {
  int64_t lo = 0, hi = size;
  while (hi - lo > 1) {
    const int64_t mid = (lo + hi) >> 1;
    if (ascending(mid) <= x) {
      lo = mid;
    } else {
      hi = mid;
    }
  }
  return lo;
}

// A launch's copies travel as its parameters, so that nothing has to stay alive behind it.
constexpr int kMaxCopies = 1000;
struct Copies {
  const char* source[kMaxCopies];
  char* destination[kMaxCopies];
  uint64_t nbytes[kMaxCopies];
  uint32_t first_tile[kMaxCopies];
  uint32_t count, tiles;
};
static_assert(sizeof(Copies) < 32700, "kernel parameters end at 32764 bytes");

__global__ void __launch_bounds__(kWarps * 32) bucket_kernel(RL_CONSTANT_PARAMETER(Copies) copies) {
  const int64_t tile = int64_t(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  if (tile >= copies.tiles) return;
  const int64_t c = last_at_most([&](int64_t k) { return int64_t(copies.first_tile[k]); }, copies.count, tile);
  const int64_t offset = (tile - copies.first_tile[c]) * kWarpTile, size = int64_t(copies.nbytes[c]);
  copy_bytes(copies.destination[c] + offset, copies.source[c] + offset, min(kWarpTile, size - offset));
}

}  // namespace
}  // namespace rl

extern "C" int rl_cuda_bucket_copy(const uint64_t* sources, const uint64_t* destinations, const uint64_t* nbytes, int64_t count,
                                   void* stream) {
  using namespace rl;
  Copies copies;
  int64_t next = 0;
  while (next < count) {
    copies.count = copies.tiles = 0;
    for (; next < count && copies.count < kMaxCopies; ++next) {
      if (nbytes[next] == 0) continue;
      const uint64_t tiles = (nbytes[next] + kWarpTile - 1) / kWarpTile;
      if (copies.tiles + tiles >= uint64_t(1) << 32) {
        if (copies.count == 0) return int(cudaErrorInvalidValue);
        break;
      }
      const uint32_t c = copies.count++;
      copies.source[c] = reinterpret_cast<const char*>(sources[next]);
      copies.destination[c] = reinterpret_cast<char*>(destinations[next]);
      copies.nbytes[c] = nbytes[next];
      copies.first_tile[c] = copies.tiles;
      copies.tiles += uint32_t(tiles);
    }
    if (copies.count == 0) break;
    if (const int status = launch(bucket_kernel, ceil_div(copies.tiles, kWarps), kWarps * 32, stream, copies)) return status;
  }
  return 0;
}
