// Log-prob, policy loss and logits gradient with one read and one write of the logits.
//
// A cluster of blocks (one block before sm_90) holds a whole row in registers: every thread loads its vectors, the blocks exchange
// their softmax statistics through distributed shared memory, and every thread writes the gradient of what it holds. All loads of
// a row are done before its first store, so the gradient may overwrite the logits, in a narrower type too.
#include <atomic>

#include "launch.cuh"
#include "logprobs.cuh"
#include "loss.cuh"

namespace rl {
namespace {

constexpr int kMaxCluster = 8;
constexpr int kMaxDevices = 64;

template <int THREADS>
struct Exchange {
  Stats stats[kMaxCluster * THREADS / 32];
};

__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Where `pointer` of this block lies in block `rank` of the cluster, written through the returned 32-bit address.
__device__ __forceinline__ void store_remote(Stats* pointer, unsigned rank, const Stats& value) {
#if __CUDA_ARCH__ >= 900
  uint32_t local = uint32_t(__cvta_generic_to_shared(pointer)), remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(remote), "f"(value.max), "f"(value.sum), "f"(value.dot),
               "f"(value.square)
               : "memory");
#else
  *pointer = value;
#endif
}

// What every thread makes of the statistics of all the row's warps: the same bits.
template <int MODE, int ENTRIES>
__device__ __forceinline__ Stats merge_entries(const Stats* entries) {
  constexpr int kRounds = (ENTRIES + 31) / 32;
  const int lane = threadIdx.x & 31;
  Stats held[kRounds];
  float max = -INFINITY;
#pragma unroll
  for (int e = 0; e < kRounds; ++e) {
    held[e] = e * 32 + lane < ENTRIES ? entries[e * 32 + lane] : empty_stats();
    max = max_nan(max, held[e].max);
  }
  Stats st = rescale(held[0], max);
#pragma unroll
  for (int e = 1; e < kRounds; ++e) {
    const Stats more = rescale(held[e], max);
    st.sum += more.sum, st.dot += more.dot;
  }
  return warp_merge<(MODE & kDot) != 0, false>(st);
}

__device__ __forceinline__ void wait_for(uint32_t barrier, unsigned phase) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
          barrier),
      "r"(phase)
      : "memory");
#endif
}

// Hand this warp's statistics to every block of the cluster; each store announces its bytes to the receiver's barrier. Unlike a
// cluster barrier this does not wait for the gradient stores of the row before.
template <int CLUSTER>
__device__ __forceinline__ void send_stats(Stats* entry, uint64_t* barrier, const Stats& st) {
#if __CUDA_ARCH__ >= 900
  const int lane = threadIdx.x & 31;
  if (lane >= CLUSTER) return;
  uint32_t to, signal;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(uint32_t(__cvta_generic_to_shared(entry))), "r"(lane));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(signal) : "r"(uint32_t(__cvta_generic_to_shared(barrier))), "r"(lane));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(st.max),
               "f"(st.sum), "f"(st.dot), "f"(st.square), "r"(signal)
               : "memory");
#endif
}

// The statistics of the whole row, the same bits in every thread of the cluster.
template <int MODE, int CLUSTER, int THREADS>
__device__ __forceinline__ Stats cluster_merge(Stats st, Exchange<THREADS>& shared, unsigned rank) {
  constexpr int kWarps = THREADS / 32, kEntries = CLUSTER * kWarps;
  constexpr bool kWithDot = (MODE & kDot) != 0;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  st = warp_merge<kWithDot, false>(st);
  if constexpr (CLUSTER > 1) {
    if (lane < CLUSTER) store_remote(&shared.stats[rank * kWarps + warp], lane, st);
    cluster_arrive();
    cluster_wait();
  } else {
    if (lane == 0) shared.stats[warp] = st;
    __syncthreads();
  }
  return merge_entries<MODE, kEntries>(shared.stats);
}

// A row of gradients, whose type is the logits' own or, for float32 logits, any. WHOLE: only whole, aligned vectors are written.
template <typename T, bool WHOLE>
struct RowWriter {
  char* row;
  int dtype;
  bool aligned;  // to whole vectors
  static constexpr int k = Element<T>::kPerVec;

  __device__ RowWriter(const rl_fused_out& out, int64_t index) : dtype(out.grad_dtype) {
    const int size = sizeof(T) == 4 && dtype == RL_F32 ? 4 : 2;
    row = static_cast<char*>(out.grad_logits) + index * out.grad_stride * size;
    aligned = (reinterpret_cast<uintptr_t>(row) & (k * size - 1)) == 0;
  }

  template <typename Out>
  __device__ __forceinline__ void write_as(int first, int size, const float (&x)[k]) const {
    Out* to = reinterpret_cast<Out*>(row) + first;
    if (WHOLE || (aligned && first + k <= size)) {
      if constexpr (sizeof(T) == sizeof(Out)) {
        store_stream(to, pack_vec<Out>(x));
      } else {  // 4 elements of 2 bytes
        __stcs(reinterpret_cast<uint2*>(to), make_uint2(Element<Out>::pack(x), Element<Out>::pack(x + 2)));
      }
      return;
    }
    if constexpr (!WHOLE) {
#pragma unroll
      for (int j = 0; j < k; ++j)
        if (first + j < size) to[j] = Element<Out>::from_float(x[j]);
    }
  }

  __device__ __forceinline__ void write(int first, int size, const float (&x)[k]) const {
    if constexpr (sizeof(T) == 2) {
      write_as<T>(first, size, x);
    } else if (dtype == RL_F32) {
      write_as<float>(first, size, x);
    } else if (dtype == RL_BF16) {
      write_as<__nv_bfloat16>(first, size, x);
    } else {
      write_as<__half>(first, size, x);
    }
  }
};

// What a row's gradient reads beside its logits, fetched before the logits are waited for.
struct RowInputs {
  float label_x, old, advantage, ref, weight, share, given, given_entropy;
};

template <typename T>
__device__ __forceinline__ RowInputs row_inputs(const rl_logits& a, const rl_loss_tokens& tokens, const rl_fused_out& out, int64_t i,
                                                int64_t label, const T* src) {
  RowInputs r;
  r.label_x = label >= 0 && label < a.vocab ? Element<T>::to_float(src[label]) : NAN;
  const bool given = out.given_grad != nullptr;
  r.given = given ? out.given_grad[i] : 0.f;
  r.given_entropy = out.given_grad_entropy ? out.given_grad_entropy[i] : 0.f;
  r.old = given ? 0.f : tokens.old_logprobs[i];
  r.advantage = given ? 0.f : tokens.advantages[i];
  r.ref = tokens.ref_logprobs ? tokens.ref_logprobs[i] : 0.f;
  r.weight = tokens.weights ? tokens.weights[i] : 1.f;
  r.share = (out.token_scale ? out.token_scale[i] : 1.f) / denominator_of(tokens);
  return r;
}

__device__ __forceinline__ bool is_scored(const rl_logits& a, const rl_loss_tokens& tokens, int64_t i) {
  return (tokens.loss_mask == nullptr || tokens.loss_mask[i] != 0) && !is_ignored(a, a.labels[i]);
}

// The gradient of row i, whose statistics are `st`; thread `writer` also writes the row's results.
template <int MODE>
__device__ __forceinline__ RowGrad row_gradient(const Stats& st, const RowInputs& in, const rl_loss_spec& spec,
                                                const rl_loss_tokens& tokens, const rl_fused_out& out, int64_t i, const Scale& scale,
                                                bool writer) {
  const RowResult result = finish_row(st, scale.cap<MODE>(in.label_x) * scale.log2);
  if (writer) {
    if (out.logprobs) out.logprobs[i] = result.logprob;
    if (out.entropy) out.entropy[i] = result.entropy;
  }
  if (out.given_grad) return make_grad(in.given, in.given_entropy, result.logprob, result.lse, result.entropy, scale);
  const Term term = token_term(spec, result.logprob, in.old, in.advantage, 0.f);
  const Kl kl = tokens.ref_logprobs ? kl_term(spec.kl, result.logprob - in.ref) : Kl{0.f, 0.f};
  const float g = (term.grad * in.weight + spec.kl_coef * kl.grad) * in.share;
  return make_grad(g, -spec.entropy_coef * in.share, result.logprob, result.lse, result.entropy, scale);
}

// Statistics of the vectors a thread holds: numbers first, first + step, ... below `full` (whole) or at it (the partial one).
template <typename T, int MODE, int N>
__device__ __forceinline__ Stats held_stats(const uint4 (&v)[N], int first, int step, int full, int64_t size, const Scale& scale) {
  Stats st = empty_stats();
  constexpr int kTile = MODE & kSoftcap ? 1 : N % 5 == 0 ? 5 : N % 4 == 0 ? 4 : N % 3 == 0 ? 3 : 1;
#pragma unroll
  for (int u = 0; u < N; u += kTile) {
    uint4 tile[kTile];
#pragma unroll
    for (int w = 0; w < kTile; ++w) tile[w] = first + (u + w) * step < full ? v[u + w] : neg_inf_vec<T>();
    if (!(MODE & kSoftcap) || first + u * step < full) add_tile<T, MODE>(st, tile, scale);
  }
#pragma unroll
  for (int u = 0; u < N; ++u)
    if (first + u * step == full && full * int64_t(Element<T>::kPerVec) < size) add_tail<T, MODE>(st, v[u], full, size, scale);
  return st;
}

template <typename T, int MODE, int N, bool WHOLE>
__device__ __forceinline__ void write_held(const RowWriter<T, WHOLE>& writer, const uint4 (&v)[N], int first, int step, int stop, int size,
                                           int label, const RowGrad& g, const Scale& scale) {
  constexpr int k = Element<T>::kPerVec;
#pragma unroll
  for (int u = 0; u < N; ++u) {
    const int n = first + u * step;
    if (n >= stop) continue;
    float x[k] = {};
    if (!g.is_zero) vec_grad<T, MODE>(v[u], n * k, label, g, scale, x);
    writer.write(n * k, size, x);
  }
}

template <typename T, bool WHOLE>
__device__ __forceinline__ void write_zeros(const RowWriter<T, WHOLE>& writer, int first, int step, int stop, int size) {
  const float zero[Element<T>::kPerVec] = {};
  for (int n = first; n < stop; n += step) writer.write(n * Element<T>::kPerVec, size, zero);
}

__device__ __forceinline__ void write_unscored(const rl_fused_out& out, int64_t i) {
  if (out.logprobs) out.logprobs[i] = 0.f;
  if (out.entropy) out.entropy[i] = 0.f;
}

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
  extern __shared__ __align__(128) uint4 stage[];  // THREADS * N
  __shared__ Exchange<THREADS> shared[2];
  __shared__ uint64_t arrived, exchanged[2];
  constexpr int kEntries = CLUSTER * THREADS / 32;
  const unsigned rank = blockIdx.x % CLUSTER;
  const int64_t clusters = gridDim.x / CLUSTER;
  const int num_vecs = int(a.vocab / k), share = (num_vecs + CLUSTER - 1) / CLUSTER;
  const int begin = min(int(rank) * share, num_vecs), stop = min(begin + share, num_vecs);
  const int first = begin + int(threadIdx.x);
  const uint32_t barrier = uint32_t(__cvta_generic_to_shared(&arrived)), target = uint32_t(__cvta_generic_to_shared(stage));
  if (threadIdx.x == 0) {
    for (uint64_t* b : {&arrived, &exchanged[0], &exchanged[1]})
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(uint32_t(__cvta_generic_to_shared(b))));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  cluster_arrive();
  cluster_wait();
  auto fetch = [&](int64_t i) {  // by one thread
    const T* src = static_cast<const T*>(a.data) + logits_row(a, i) * a.row_stride + int64_t(begin) * k;
    const uint32_t bytes = uint32_t(stop - begin) * 16;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    if (bytes) {
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target), "l"(src),
                   "r"(bytes), "r"(barrier)
                   : "memory");
    }
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
      wait_for(barrier, phase);
      phase ^= 1;
      uint4 v[N];
#pragma unroll
      for (int u = 0; u < N; ++u) v[u] = first + u * THREADS < stop ? stage[threadIdx.x + u * THREADS] : uint4{};
      __syncthreads();
      pending = next_scored;
      if (pending && threadIdx.x == 0) fetch(i + clusters);
      const uint32_t exchange = uint32_t(__cvta_generic_to_shared(&exchanged[slot]));
      if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(exchange), "r"(kEntries * int(sizeof(Stats))) : "memory");
      }
      Stats st = warp_merge<(MODE & kDot) != 0, false>(held_stats<T, MODE>(v, first, THREADS, stop, int64_t(stop) * k, scale));
      send_stats<CLUSTER>(&shared[slot].stats[rank * (THREADS / 32) + (threadIdx.x >> 5)], &exchanged[slot], st);
      wait_for(exchange, turns >> 1 & 1);
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
int launch(const rl_logits& a, const rl_loss_spec& spec, const rl_loss_tokens& tokens, const rl_fused_out& out, void* stream) {
  if (a.rows * CLUSTER >= int64_t(1) << 31) return int(cudaErrorInvalidConfiguration);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(a.rows * CLUSTER));
  config.blockDim = dim3(THREADS);
  config.stream = as_stream(stream);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = CLUSTER;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = CLUSTER > 1 ? 1 : 0;
  return int(cudaLaunchKernelEx(&config, fused_kernel<T, MODE, CLUSTER, THREADS, N>, a, spec, tokens, out));
}

bool has_clusters() {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major >= 9;
}

using Kernel = void (*)(rl_logits, rl_loss_spec, rl_loss_tokens, rl_fused_out);

// As many clusters as fit on the device, or as there are rows. `resident` remembers how many fit on each.
int launch_resident(Kernel kernel, int cluster, int threads, int shared_bytes, std::atomic<int>* resident, const rl_logits& a,
                    const rl_loss_spec& spec, const rl_loss_tokens& tokens, const rl_fused_out& out, void* stream) {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(shared_bytes);
  config.stream = as_stream(stream);
  config.gridDim = dim3(unsigned(cluster));
  int device = 0;
  cudaGetDevice(&device);
  int clusters = resident[device % kMaxDevices].load(std::memory_order_relaxed);
  if (clusters == 0) {
    if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes)) return int(error);
    if (const auto error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config)) return int(error);
    if (clusters == 0) return int(RL_CUDA_NOT_SUPPORTED);
    resident[device % kMaxDevices].store(clusters, std::memory_order_relaxed);
  }
  config.gridDim = dim3(unsigned((a.rows < clusters ? a.rows : clusters) * cluster));
  return int(cudaLaunchKernelEx(&config, kernel, a, spec, tokens, out));
}

template <typename T, int MODE, int CLUSTER, int THREADS, int N, int BLOCKS>
int launch_streaming(const rl_logits& a, const rl_loss_spec& spec, const rl_loss_tokens& tokens, const rl_fused_out& out, void* stream) {
  static std::atomic<int> resident[kMaxDevices];
  return launch_resident(streaming_kernel<T, MODE, CLUSTER, THREADS, N, BLOCKS>, CLUSTER, THREADS, THREADS * N * 16, resident, a, spec,
                         tokens, out, stream);
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
  if (vecs <= 256 * 4) return launch<T, MODE, 1, 256, 4>(a, spec, tokens, out, stream);
  if (vecs <= 512 * 8) return launch<T, MODE, 1, 512, 8>(a, spec, tokens, out, stream);
  if (!has_clusters()) return int(RL_CUDA_NOT_SUPPORTED);
  const bool streams = is_aligned<T>(a, out);
  if (vecs <= 8 * 256 * 10) {
    return streams ? launch_streaming<T, MODE, 8, 256, 10, 3>(a, spec, tokens, out, stream)
                   : launch<T, MODE, 8, 256, 10>(a, spec, tokens, out, stream);
  }
  if (vecs <= 8 * 512 * 10) {
    return streams ? launch_streaming<T, MODE, 8, 512, 10, 2>(a, spec, tokens, out, stream)
                   : launch<T, MODE, 8, 512, 10>(a, spec, tokens, out, stream);
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
  const bool with_entropy = out->entropy || out->given_grad_entropy || spec->entropy_coef != 0.f;
  return by_dtype(in->dtype, [&](auto t) {
    using T = decltype(t);
    if (in->softcap > 0.f) return by_size<T, kDot | kSoftcap>(*in, *spec, *tokens, *out, stream);
    if (with_entropy) return by_size<T, kDot>(*in, *spec, *tokens, *out, stream);
    return by_size<T, 0>(*in, *spec, *tokens, *out, stream);
  });
}
#endif  // RL_CSRC_TUNE
