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

struct Rows {
  const char* src;
  char* dst;
  const int64_t* cu;
  const int64_t* starts;
  int64_t sequences, length, tokens, token_bytes;
  int64_t rank, size;  // context-parallel
};

// Calls piece(sequence, first, last) for the tokens of this warp's tile of packed output that lie in one sequence.
template <typename Boundary, typename Piece>
__device__ __forceinline__ void for_pieces(const Rows& r, const Boundary& boundary, const Piece& piece) {
  const int64_t per_tile = max(int64_t(1), kWarpTile / r.token_bytes);
  int64_t first = (int64_t(blockIdx.x) * kWarps + (threadIdx.x >> 5)) * per_tile;
  const int64_t stop = min(first + per_tile, r.tokens);
  if (first >= stop) return;
  int64_t b = last_at_most(boundary, r.sequences, first);
  while (first < stop) {
    const int64_t last = min(boundary(b + 1), stop);
    if (first < last) piece(b, first, last);
    first = max(first, last);
    ++b;
  }
}

__global__ void __launch_bounds__(kWarps * 32) pack_kernel(const Rows r) {
  for_pieces(r, [&](int64_t b) { return r.cu[b]; }, [&](int64_t b, int64_t first, int64_t last) {
    const int64_t column = first - r.cu[b] + (r.starts ? r.starts[b] : 0);
    copy_bytes(r.dst + first * r.token_bytes, r.src + (b * r.length + column) * r.token_bytes, (last - first) * r.token_bytes);
  });
}

__global__ void __launch_bounds__(kWarps * 32) unpack_kernel(const Rows r, bool pad_left) {
  for_pieces(r, [&](int64_t b) { return r.cu[b]; }, [&](int64_t b, int64_t first, int64_t last) {
    const int64_t column = first - r.cu[b] + (pad_left ? r.length - (r.cu[b + 1] - r.cu[b]) : 0);
    copy_bytes(r.dst + (b * r.length + column) * r.token_bytes, r.src + first * r.token_bytes, (last - first) * r.token_bytes);
  });
}

__global__ void __launch_bounds__(kWarps * 32) cp_slice_kernel(const Rows r) {
  for_pieces(r, [&](int64_t b) { return r.cu[b] / r.size; }, [&](int64_t b, int64_t first, int64_t last) {
    const int64_t begin = r.cu[b], chunk = (r.cu[b + 1] - begin) / (2 * r.size), mine = begin / r.size;
    const int64_t middle = mine + chunk;  // where the mirror chunk starts in the output
    const int64_t a = min(last, middle), c = max(first, middle);
    if (first < a) {
      copy_bytes(r.dst + first * r.token_bytes, r.src + (begin + r.rank * chunk + first - mine) * r.token_bytes,
                 (a - first) * r.token_bytes);
    }
    if (c < last) {
      copy_bytes(r.dst + c * r.token_bytes, r.src + (begin + (2 * r.size - 1 - r.rank) * chunk + c - middle) * r.token_bytes,
                 (last - c) * r.token_bytes);
    }
  });
}

__global__ void roll_kernel(const int64_t* ids, const int64_t* cu, int64_t sequences, int64_t tokens, const uint8_t* mask,
                            int64_t ignore_index, int64_t* labels) {
  const int64_t t = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t >= tokens) return;
  const int64_t b = last_at_most([&](int64_t k) { return cu[k]; }, sequences, t);
  const bool ends = t + 1 >= cu[b + 1];
  labels[t] = ends || (mask && mask[t + 1] == 0) ? ignore_index : ids[t + 1];
}

int64_t row_blocks(const Rows& r) {
  const int64_t per_tile = r.token_bytes < kWarpTile ? kWarpTile / r.token_bytes : 1;
  return ceil_div(r.tokens, per_tile * kWarps);
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

extern "C" int rl_cuda_pack(const void* padded, const int64_t* cu_seqlens, const int64_t* starts, int64_t sequences, int64_t length,
                            int64_t tokens, int64_t token_bytes, void* packed, void* stream) {
  using namespace rl;
  if (tokens == 0 || token_bytes == 0) return 0;
  const Rows r{static_cast<const char*>(padded), static_cast<char*>(packed), cu_seqlens, starts, sequences, length, tokens, token_bytes, 0, 1};
  return launch(pack_kernel, row_blocks(r), kWarps * 32, stream, r);
}

extern "C" int rl_cuda_unpack(const void* packed, const int64_t* cu_seqlens, int64_t sequences, int64_t length, int64_t tokens,
                              int64_t token_bytes, int32_t pad_left, void* padded, void* stream) {
  using namespace rl;
  if (tokens == 0 || token_bytes == 0) return 0;
  const Rows r{static_cast<const char*>(packed), static_cast<char*>(padded), cu_seqlens, nullptr, sequences, length, tokens, token_bytes, 0, 1};
  return launch(unpack_kernel, row_blocks(r), kWarps * 32, stream, r, pad_left != 0);
}

extern "C" int rl_cuda_cp_slice(const void* x, const int64_t* cu_seqlens, int64_t sequences, int64_t tokens, int64_t token_bytes,
                                int64_t cp_rank, int64_t cp_size, void* out, void* stream) {
  using namespace rl;
  if (tokens == 0 || token_bytes == 0) return 0;
  const Rows r{static_cast<const char*>(x), static_cast<char*>(out), cu_seqlens, nullptr, sequences, 0, tokens, token_bytes, cp_rank, cp_size};
  return launch(cp_slice_kernel, row_blocks(r), kWarps * 32, stream, r);
}

extern "C" int rl_cuda_roll_labels(const int64_t* token_ids, const int64_t* cu_seqlens, int64_t sequences, int64_t tokens,
                                   const uint8_t* loss_mask, int64_t ignore_index, int64_t* labels, void* stream) {
  using namespace rl;
  if (tokens == 0) return 0;
  return launch(roll_kernel, ceil_div(tokens, 256), 256, stream, token_ids, cu_seqlens, sequences, tokens, loss_mask, ignore_index, labels);
}
