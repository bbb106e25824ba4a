// What the kernels and their launches ask of the GPU beyond C++: types and intrinsics, PTX, clusters, launches. A build with
// RL_CSRC_EMULATED takes all of it from a header that stands in for the GPU on a CPU (tests/emulated).
#pragma once
#ifdef RL_CSRC_EMULATED
#include "emulated_device.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <utility>

// A parameter that all threads read where the launch put it.
#define RL_CONSTANT_PARAMETER(type) const __grid_constant__ type

namespace rl {

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Like fmaxf, except that a NaN wins: a NaN logit must not vanish.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ __forceinline__ uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// ---- shared memory and the cluster's other blocks --------------------------------------------------------------------

// The shared memory that the launch adds to the declared arrays.
__device__ __forceinline__ uint4* dynamic_shared() {
  extern __shared__ __align__(128) uint4 added[];
  return added;
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Where `p` of this block lies in block `rank` of the cluster.
__device__ __forceinline__ uint32_t shared_address_of(const void* p, unsigned rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(p)), "r"(rank));
  return remote;
}
#endif

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

// Write to `p` as it lies in block `rank`.
__device__ __forceinline__ void store_remote(void* p, unsigned rank, const float4& v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address_of(p, rank)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
#else
  *static_cast<float4*>(p) = v;
#endif
}

// The same without waiting; the 16 bytes are announced to that block's `barrier`.
__device__ __forceinline__ void send_remote(void* p, uint64_t* barrier, unsigned rank, const float4& v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   shared_address_of(p, rank)),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(shared_address_of(barrier, rank))
               : "memory");
#endif
}

// A barrier in shared memory whose phase ends when one thread has called `barrier_expect` and that many bytes have come.
__device__ __forceinline__ void barrier_init(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)));
#endif
}

// After the last `barrier_init`: the cluster sees them.
__device__ __forceinline__ void barriers_are_made() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
#endif
}

// Returns when the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

// Start a copy by the copy engine into shared memory, announced to `barrier`: whole multiples of 16 bytes, aligned to as many.
__device__ __forceinline__ void fetch_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}

// ---- launches --------------------------------------------------------------------------------------------------------

// Each returns the cudaError_t of the launch; arguments become the kernel's parameters before it returns.
template <typename... Params, typename... Args>
int launch(void (*kernel)(Params...), int64_t blocks, int threads, void* stream, Args&&... args) {
  if (blocks >= int64_t(1) << 31) return int(cudaErrorInvalidConfiguration);
  kernel<<<unsigned(blocks), unsigned(threads), 0, static_cast<cudaStream_t>(stream)>>>(std::forward<Args>(args)...);
  return int(cudaGetLastError());
}

// A grid of `clusters` of `size` blocks, each with `shared_bytes` of added shared memory.
struct Clusters {
  int size, threads, shared_bytes;
};

inline cudaLaunchConfig_t launch_config(const Clusters& shape, int64_t clusters, cudaLaunchAttribute& attribute) {
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(shape.size);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(clusters * shape.size));
  config.blockDim = dim3(unsigned(shape.threads));
  config.dynamicSmemBytes = size_t(shape.shared_bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return config;
}

template <typename... Params, typename... Args>
int launch_clusters(void (*kernel)(Params...), const Clusters& shape, int64_t clusters, void* stream, Args&&... args) {
  if (clusters * shape.size >= int64_t(1) << 31) return int(cudaErrorInvalidConfiguration);
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config = launch_config(shape, clusters, attribute);
  config.stream = static_cast<cudaStream_t>(stream);
  return int(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

// How many clusters fit on the device at once. The kernel may use the added shared memory from then on.
template <typename... Params>
int count_resident(void (*kernel)(Params...), const Clusters& shape, int* clusters) {
  if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes)) return int(error);
  cudaLaunchAttribute attribute{};
  const cudaLaunchConfig_t config = launch_config(shape, 1, attribute);
  return int(cudaOccupancyMaxActiveClusters(clusters, kernel, &config));
}

}  // namespace rl
#endif  // RL_CSRC_EMULATED
