// Log-prob, policy loss and logits gradient with one read and one write of the logits.
//
// A cluster of blocks (one block before sm_90) holds a whole row in registers: every thread loads its vectors, the blocks exchange
// their softmax statistics through distributed shared memory, and every thread writes the gradient of what it holds. All loads of
// a row are done before its first store, so the gradient may overwrite the logits, in a narrower type too.
#include <atomic>

#include "cluster.cuh"
#include "fused_row.cuh"
#include "launch.cuh"

namespace rl {
namespace {

constexpr int kMaxDevices = 64;

// Rows of any alignment: one cluster per row. N: vectors that a thread holds.
template <typename T, int MODE, int CLUSTER, int THREADS, int N>
__global__ void __launch_bounds__(THREADS) fused_kernel(const rl_logits a, const rl_loss_spec spec, const rl_loss_tokens tokens,
                                                        const rl_fused_out out) {
  constexpr int k = Element<T>::kPerVec;
  __shared__ Exchange<THREADS> shared;
  const unsigned rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
  const int64_t i = blockIdx.x / CLUSTER;
  const int64_t row = logits_row(a, i);
  const T* src = static_cast<const T*>(a.data) + row * a.row_stride;
  const RowWriter<T, false> writer(out, row);
  const int64_t label = a.labels[i];
  const int first = int(rank) * THREADS + int(threadIdx.x);
  constexpr int kStep = CLUSTER * THREADS;
  const int num_vecs = int((a.vocab + k - 1) / k), full = int(a.vocab / k);
  if constexpr (CLUSTER > 1) cluster_arrive();
  if (!is_scored(a, tokens, i)) {  // the same for the whole cluster
    write_zeros(writer, first, kStep, num_vecs, int(a.vocab));
    if (first == 0) write_unscored(out, i);
    if constexpr (CLUSTER > 1) cluster_wait();
    return;
  }
  const Scale scale = row_scale(a, i);
  const RowInputs inputs = row_inputs(a, tokens, out, i, label, src);
  const RowReader<T> reader(src, a.vocab);
  uint4 v[N];
#pragma unroll
  for (int u = 0; u < N; ++u) {
    const int n = first + u * kStep;
    v[u] = reader.shift == 0 && n < full ? reader.aligned(n) : n < num_vecs ? reader.shifted(n) : uint4{};
  }
  Stats st = held_stats<T, MODE>(v, first, kStep, full, a.vocab, scale);
  if constexpr (CLUSTER > 1) cluster_wait();  // the other blocks have started: their shared memory is there
  st = cluster_merge<MODE, CLUSTER, THREADS>(st, shared, rank);
  const RowGrad g = row_gradient<MODE>(st, inputs, spec, tokens, out, i, scale, first == 0);
  write_held<T, MODE>(writer, v, first, kStep, num_vecs, int(a.vocab), int(label), g, scale);
}

// Aligned rows on sm_90 and later: clusters stay and take rows in turn. While a row is worked on in registers, the copy engine
// brings the next one into shared memory.
template <typename T, int MODE, int CLUSTER, int THREADS, int N, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) streaming_kernel(const rl_logits a, const rl_loss_spec spec,
                                                                    const rl_loss_tokens tokens, const rl_fused_out out) {
#if __CUDA_ARCH__ >= 900
  constexpr int k = Element<T>::kPerVec;
  uint4* const stage = dynamic_shared();  // THREADS * N
  __shared__ Exchange<THREADS> shared[2];
  __shared__ uint64_t arrived, exchanged[2];
  constexpr int kEntries = CLUSTER * THREADS / 32;
  const unsigned rank = blockIdx.x % CLUSTER;
  const int64_t clusters = gridDim.x / CLUSTER;
  const int num_vecs = int(a.vocab / k), share = (num_vecs + CLUSTER - 1) / CLUSTER;
  const int begin = min(int(rank) * share, num_vecs), stop = min(begin + share, num_vecs);
  const int first = begin + int(threadIdx.x);
  if (threadIdx.x == 0) {
    for (uint64_t* b : {&arrived, &exchanged[0], &exchanged[1]}) barrier_init(b);
    barriers_are_made();
  }
  __syncthreads();
  cluster_arrive();
  cluster_wait();
  auto fetch = [&](int64_t i) {  // by one thread
    const T* src = static_cast<const T*>(a.data) + logits_row(a, i) * a.row_stride + int64_t(begin) * k;
    const uint32_t bytes = uint32_t(stop - begin) * 16;
    barrier_expect(&arrived, bytes);
    if (bytes) fetch_bulk(stage, src, bytes, &arrived);
  };
  int64_t i = blockIdx.x / CLUSTER;
  bool scored = i < a.rows && is_scored(a, tokens, i);
  bool next_scored = i + clusters < a.rows && is_scored(a, tokens, i + clusters);
  bool pending = false;  // a fetch is under way: of this row or of the next
  unsigned phase = 0, slot = 0, turns = 0;
  for (; i < a.rows; i += clusters) {
    const int64_t after = i + 2 * clusters;
    const bool after_scored = after < a.rows && is_scored(a, tokens, after);
    const int64_t row = logits_row(a, i);
    const RowWriter<T, true> writer(out, row);
    if (scored) {
      if (!pending && threadIdx.x == 0) fetch(i);
      const int64_t label = a.labels[i];
      const Scale scale = row_scale(a, i);
      const RowInputs inputs = row_inputs(a, tokens, out, i, label, static_cast<const T*>(a.data) + row * a.row_stride);
      barrier_wait(&arrived, phase);
      phase ^= 1;
      uint4 v[N];
#pragma unroll
      for (int u = 0; u < N; ++u) v[u] = first + u * THREADS < stop ? stage[threadIdx.x + u * THREADS] : uint4{};
      __syncthreads();
      pending = next_scored;
      if (pending && threadIdx.x == 0) fetch(i + clusters);
      if (threadIdx.x == 0) barrier_expect(&exchanged[slot], kEntries * sizeof(Stats));
      Stats st = warp_merge<(MODE & kDot) != 0, false>(held_stats<T, MODE>(v, first, THREADS, stop, int64_t(stop) * k, scale));
      send_stats<CLUSTER>(&shared[slot].stats[rank * (THREADS / 32) + (threadIdx.x >> 5)], &exchanged[slot], st);
      barrier_wait(&exchanged[slot], turns >> 1 & 1);
      st = merge_entries<MODE, kEntries>(shared[slot].stats);
      slot ^= 1;
      ++turns;
      const RowGrad g = row_gradient<MODE>(st, inputs, spec, tokens, out, i, scale, first == 0);
      write_held<T, MODE>(writer, v, first, THREADS, stop, int(a.vocab), int(label), g, scale);
    } else {
      if (!pending && next_scored) {
        pending = true;
        if (threadIdx.x == 0) fetch(i + clusters);
      }
      write_zeros(writer, first, THREADS, stop, int(a.vocab));
      if (first == 0) write_unscored(out, i);
    }
    scored = next_scored;
    next_scored = after_scored;
  }
#endif
}

template <typename T, int MODE, int CLUSTER, int THREADS, int N>
int launch_rows(const rl_logits& a, const rl_loss_spec& spec, const rl_loss_tokens& tokens, const rl_fused_out& out, void* stream) {
  auto* kernel = fused_kernel<T, MODE, CLUSTER, THREADS, N>;
  if constexpr (CLUSTER == 1) return launch(kernel, a.rows, THREADS, stream, a, spec, tokens, out);
  return launch_clusters(kernel, {CLUSTER, THREADS, 0}, a.rows, stream, a, spec, tokens, out);
}

bool has_clusters() {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major >= 9;
}

// As many clusters as fit on the device, or as there are rows. `resident` remembers how many fit on each.
template <typename T, int MODE, int CLUSTER, int THREADS, int N, int BLOCKS>
int launch_streaming(const rl_logits& a, const rl_loss_spec& spec, const rl_loss_tokens& tokens, const rl_fused_out& out, void* stream) {
  static std::atomic<int> resident[kMaxDevices];
  auto* kernel = streaming_kernel<T, MODE, CLUSTER, THREADS, N, BLOCKS>;
  constexpr Clusters kShape{CLUSTER, THREADS, THREADS * N * 16};
  int device = 0;
  cudaGetDevice(&device);
  int clusters = resident[device % kMaxDevices].load(std::memory_order_relaxed);
  if (clusters == 0) {
    if (const int status = count_resident(kernel, kShape, &clusters)) return status;
    if (clusters == 0) return int(RL_CUDA_NOT_SUPPORTED);
    resident[device % kMaxDevices].store(clusters, std::memory_order_relaxed);
  }
  return launch_clusters(kernel, kShape, a.rows < clusters ? a.rows : clusters, stream, a, spec, tokens, out);
}

// Whether all rows, of logits and of gradients, are whole vectors at aligned addresses.
template <typename T>
bool is_aligned(const rl_logits& a, const rl_fused_out& out) {
  constexpr int k = Element<T>::kPerVec;
  return reinterpret_cast<uintptr_t>(a.data) % 16 == 0 && reinterpret_cast<uintptr_t>(out.grad_logits) % 16 == 0 &&
         a.row_stride % k == 0 && out.grad_stride % k == 0 && a.vocab % k == 0;
}

template <typename T, int MODE>
int by_size(const rl_logits& a, const rl_loss_spec& spec, const rl_loss_tokens& tokens, const rl_fused_out& out, void* stream) {
  const int64_t vecs = ceil_div(a.vocab, Element<T>::kPerVec);
  if (vecs <= 256 * 4) return launch_rows<T, MODE, 1, 256, 4>(a, spec, tokens, out, stream);
  if (vecs <= 512 * 8) return launch_rows<T, MODE, 1, 512, 8>(a, spec, tokens, out, stream);
  if (!has_clusters()) return int(RL_CUDA_NOT_SUPPORTED);
  const bool streams = is_aligned<T>(a, out);
  if (vecs <= 8 * 256 * 10) {
    return streams ? launch_streaming<T, MODE, 8, 256, 10, 3>(a, spec, tokens, out, stream)
                   : launch_rows<T, MODE, 8, 256, 10>(a, spec, tokens, out, stream);
  }
  if (vecs <= 8 * 512 * 10) {
    return streams ? launch_streaming<T, MODE, 8, 512, 10, 2>(a, spec, tokens, out, stream)
                   : launch_rows<T, MODE, 8, 512, 10>(a, spec, tokens, out, stream);
  }
  return int(RL_CUDA_NOT_SUPPORTED);
}

}  // namespace
}  // namespace rl

#ifndef RL_CSRC_TUNE
extern "C" int rl_cuda_policy_loss_from_logits(const rl_logits* in, const rl_loss_spec* spec, const rl_loss_tokens* tokens,
                                               const rl_fused_out* out, void* stream) {
  using namespace rl;
  if (in->rows == 0) return 0;
  if (spec->loss == RL_GSPO || spec->loss == RL_GMPO) return int(cudaErrorInvalidValue);
  if (in->dtype != RL_F32 && in->dtype != out->grad_dtype) return int(cudaErrorInvalidValue);
  const bool with_entropy = out->entropy || spec->entropy_coef != 0.f;
  return by_dtype(in->dtype, [&](auto t) {
    using T = decltype(t);
    if (in->softcap > 0.f) return by_size<T, kDot | kSoftcap>(*in, *spec, *tokens, *out, stream);
    if (with_entropy) return by_size<T, kDot>(*in, *spec, *tokens, *out, stream);
    return by_size<T, 0>(*in, *spec, *tokens, *out, stream);
  });
}
#endif  // RL_CSRC_TUNE
