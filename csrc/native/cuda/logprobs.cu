// Log-probabilities of labels from logits: one read forward (one block per row), one read and one write backward.
//
// Which thread adds which column depends on the vocab size alone, so a row's result has the same bits at any batch size, row
// number and alignment.
#include "launch.cuh"
#include "logprobs.cuh"

namespace rl {
namespace {

constexpr int kForwardThreads = 256;
constexpr int kForwardUnroll = 4;
constexpr int kBackwardThreads = 256;
constexpr int kBackwardUnroll = 4;
constexpr int kBackwardTiles = 1;

// The block's merged statistics, in warp 0; other warps return their own.
template <int MODE>
__device__ __forceinline__ Stats block_merge(Stats st, Stats* scratch) {
  st = warp_merge<(MODE & kDot) != 0, (MODE & kSquare) != 0>(st);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (lane == 0) scratch[warp] = st;
  __syncthreads();
  if (warp == 0) st = warp_merge<(MODE & kDot) != 0, (MODE & kSquare) != 0>(lane < int(blockDim.x >> 5) ? scratch[lane] : empty_stats());
  return st;
}

// From units of log 2 to nats.
__device__ __forceinline__ void write_stats(float* out, const Stats& st, float label) {
  out[0] = st.max * kLn2;
  out[1] = st.sum;
  out[2] = st.dot * kLn2;
  out[3] = st.square;
  out[4] = label * kLn2;
}

template <typename T, int MODE, int THREADS = kForwardThreads, int UNROLL = kForwardUnroll, int BLOCKS = 4>
__global__ void __launch_bounds__(THREADS, BLOCKS) forward_kernel(const rl_logits a, const rl_logprobs_out out,
                                                                     float* packed) {
  __shared__ Stats scratch[32];
  const int64_t i = blockIdx.x;
  const int64_t label = a.labels[i];
  if (is_ignored(a, label)) {
    if (threadIdx.x == 0) {
      if (packed) write_stats(packed + i * 5, empty_stats(), INFINITY);
      if (out.logprobs) out.logprobs[i] = 0.f;
      if (out.entropy) out.entropy[i] = 0.f;
      if (out.sum_pi_squared) out.sum_pi_squared[i] = 0.f;
      if (out.lse) out.lse[i] = 0.f;
    }
    return;
  }
  const T* data = static_cast<const T*>(a.data) + logits_row(a, i) * a.row_stride;
  const Scale scale = row_scale(a, i);
  const int64_t column = label - a.vocab_start;
  const bool inside = column >= 0 && column < a.vocab;
  float label_logit = packed ? -INFINITY : NAN;  // a label outside the vocab is an error that must show
  if (threadIdx.x == 0 && inside) {
    float x = Element<T>::to_float(data[column]);
    if (a.softcap > 0.f) x = a.softcap * tanhf(x / a.softcap);
    label_logit = x * scale.log2;
  }
  const RowReader<T> row(data, a.vocab);
  Stats st = thread_stats<T, MODE, UNROLL>(row, a.vocab, scale, threadIdx.x, THREADS);
  st = block_merge<MODE>(st, scratch);
  if (threadIdx.x != 0) return;
  if (packed) {
    write_stats(packed + i * 5, st, label_logit);
    return;
  }
  const RowResult r = finish_row(st, label_logit);
  if (out.logprobs) out.logprobs[i] = r.logprob;
  if (out.entropy) out.entropy[i] = r.entropy;
  if (out.sum_pi_squared) out.sum_pi_squared[i] = r.square;
  if (out.lse) out.lse[i] = r.lse;
}

// One thread per token; shards in rank order, so that every rank computes the same bits.
__global__ void merge_kernel(const float* stats, int64_t world, int64_t rows, const rl_logprobs_out out) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= rows) return;
  const bool ignored = stats[i * 5 + 4] == INFINITY;
  float max = -INFINITY;
  for (int64_t w = 0; w < world; ++w) max = max_nan(max, stats[(w * rows + i) * 5]);
  const bool dead = max == -INFINITY;
  float sum = 0.f, dot = 0.f, square = 0.f, label = -INFINITY;
  for (int64_t w = 0; w < world && !dead; ++w) {
    const float* p = stats + (w * rows + i) * 5;
    const float shift = p[0] == -INFINITY ? 0.f : p[0] - max;  // an empty shard has sums of 0
    const float scale = expf(shift);
    sum += p[1] * scale;
    dot += scale * fmaf(p[1], shift, p[2]);
    square += p[3] * scale * scale;
    label = max_nan(label, p[4]);
  }
  const float log_sum = logf(sum);
  const bool blank = ignored || dead;
  if (out.logprobs) out.logprobs[i] = ignored ? 0.f : dead ? -INFINITY : label - max - log_sum;
  if (out.entropy) out.entropy[i] = blank ? 0.f : log_sum - dot / sum;
  if (out.sum_pi_squared) out.sum_pi_squared[i] = blank ? 0.f : square / (sum * sum);
  if (out.lse) out.lse[i] = ignored ? 0.f : dead ? -INFINITY : max + log_sum;
}

__device__ __forceinline__ RowGrad row_grad(const rl_logits& a, const rl_logprobs_grad& g, int64_t i, const Scale& scale,
                                            bool ignored) {
  const float up = ignored || !g.grad_logprobs ? 0.f : g.grad_logprobs[i];
  const float up_entropy = ignored || !g.grad_entropy ? 0.f : g.grad_entropy[i];
  return make_grad(up, up_entropy, g.logprobs[i], g.lse[i], g.grad_entropy ? g.entropy[i] : 0.f, scale);
}

// D: the gradient's type, T itself or, for float32 logits, any.
template <typename T, typename D, int MODE, int UNROLL = kBackwardUnroll, int TILES = kBackwardTiles>
__global__ void __launch_bounds__(kBackwardThreads) backward_kernel(const rl_logits a, const rl_logprobs_grad g, unsigned chunks) {
  constexpr int k = Element<T>::kPerVec;
  constexpr int kChunk = kBackwardThreads * UNROLL * TILES;  // vectors
  const int64_t i = blockIdx.x / chunks;
  const int64_t chunk = blockIdx.x % chunks;
  const int64_t r = logits_row(a, i);
  const T* src = static_cast<const T*>(a.data) + r * a.row_stride;
  D* dst = static_cast<D*>(g.grad_logits) + r * g.grad_stride;
  const Scale scale = row_scale(a, i);
  const int64_t id = a.labels[i];
  const RowGrad grad = row_grad(a, g, i, scale, is_ignored(a, id));
  const int64_t offset = id - a.vocab_start;
  const int64_t label = offset >= 0 && offset < a.vocab ? offset : -a.vocab;  // in another shard: no column's
  // Columns before the first 16-byte boundary of the logits, whole vectors after it, columns after the last whole vector.
  const uintptr_t at = reinterpret_cast<uintptr_t>(src);
  int64_t head = int64_t((16 - (at & 15)) & 15) / int64_t(sizeof(T));
  const bool aligned = (reinterpret_cast<uintptr_t>(dst + head) & (k * sizeof(D) - 1)) == 0;
  if (!aligned || head > a.vocab) head = a.vocab;
  const int64_t num_vecs = (a.vocab - head) / k;
  auto one = [&](int64_t j) {
    if (grad.is_zero) {
      dst[j] = Element<D>::from_float(0.f);
    } else {
      dst[j] = Element<D>::from_float(logit_grad<MODE>(Element<T>::to_float(src[j]), j == label, grad, scale));
    }
  };
  const int64_t stop = min(num_vecs, (chunk + 1) * kChunk);
  for (int64_t first = chunk * kChunk + threadIdx.x; first < stop; first += kBackwardThreads * UNROLL) {
    uint4 v[UNROLL];
    if (!grad.is_zero) {
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int64_t n = first + u * kBackwardThreads;
        if (n < stop) v[u] = load_stream(src + head + n * k);
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int64_t n = first + u * kBackwardThreads;
      if (n >= stop) continue;
      float out[k] = {};
      if (!grad.is_zero) vec_grad<T, MODE>(v[u], int(head + n * k), int(label), grad, scale, out);
      store_vec<T, D>(dst + head + n * k, out);
    }
  }
  const int64_t threads = int64_t(chunks) * kBackwardThreads;
  const int64_t thread = chunk * kBackwardThreads + threadIdx.x;
  for (int64_t j = thread; j < head; j += threads) one(j);
  for (int64_t j = head + num_vecs * k + thread; j < a.vocab; j += threads) one(j);
}

int forward(const rl_logits& a, const rl_logprobs_out& out, float* packed, void* stream) {
  if (a.rows == 0) return 0;
  return by_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    auto* kernel = a.softcap > 0.f                ? forward_kernel<T, kDot | kSquare | kSoftcap>
                   : packed || out.sum_pi_squared ? forward_kernel<T, kDot | kSquare>
                   : out.entropy                  ? forward_kernel<T, kDot>
                                                  : forward_kernel<T, 0>;
    return launch(kernel, a.rows, kForwardThreads, stream, a, out, packed);
  });
}

template <typename T, typename D>
int backward(const rl_logits& a, const rl_logprobs_grad& grad, void* stream) {
  const int64_t per_block = int64_t(kBackwardThreads) * kBackwardUnroll * kBackwardTiles * Element<T>::kPerVec;
  const int64_t chunks = ceil_div(a.vocab, per_block);
  auto* kernel = a.softcap > 0.f      ? backward_kernel<T, D, kDot | kSoftcap>
                 : grad.grad_entropy ? backward_kernel<T, D, kDot>
                                     : backward_kernel<T, D, 0>;
  return launch(kernel, chunks * a.rows, kBackwardThreads, stream, a, grad, unsigned(chunks));
}

// One block per row: rows that no label scores have no gradient.
template <typename T>
__global__ void zero_rows_kernel(T* data, int64_t stride, int64_t vocab, const uint8_t* is_scored) {
  if (is_scored[blockIdx.x]) return;
  T* row = data + int64_t(blockIdx.x) * stride;
  for (int64_t j = threadIdx.x; j < vocab; j += blockDim.x) row[j] = Element<T>::from_float(0.f);
}

}  // namespace
}  // namespace rl

extern "C" int rl_cuda_zero_rows(void* data, int32_t dtype, int64_t row_stride, int64_t rows, int64_t vocab, const uint8_t* is_scored,
                                 void* stream) {
  using namespace rl;
  if (rows == 0) return 0;
  return by_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    return launch(zero_rows_kernel<T>, rows, 512, stream, static_cast<T*>(data), row_stride, vocab, is_scored);
  });
}

extern "C" int rl_cuda_logprobs(const rl_logits* in, const rl_logprobs_out* out, void* stream) {
  return rl::forward(*in, *out, nullptr, stream);
}

extern "C" int rl_cuda_logprob_stats(const rl_logits* in, float* stats, void* stream) {
  return rl::forward(*in, rl_logprobs_out{}, stats, stream);
}

extern "C" int rl_cuda_stats_merge(const float* stats, int64_t world, int64_t rows, const rl_logprobs_out* out, void* stream) {
  if (rows == 0) return 0;
  return rl::launch(rl::merge_kernel, rl::ceil_div(rows, 256), 256, stream, stats, world, rows, *out);
}

extern "C" int rl_cuda_logprobs_backward(const rl_logits* in, const rl_logprobs_grad* grad, int32_t grad_dtype, void* stream) {
  using namespace rl;
  if (in->rows == 0) return 0;
  if (in->dtype != RL_F32 && in->dtype != grad_dtype) return int(cudaErrorInvalidValue);
  return by_dtype(in->dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (sizeof(T) == 2) {
      return backward<T, T>(*in, *grad, stream);
    } else {
      return by_dtype(grad_dtype, [&](auto d) { return backward<T, decltype(d)>(*in, *grad, stream); });
    }
  });
}
