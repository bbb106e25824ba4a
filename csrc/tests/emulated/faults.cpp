// Kernels with one fault each, for the tests of the emulation: every one must be seen.
#include "cuda/device.cuh"

namespace rl {
namespace {

__global__ void no_barrier_kernel(int* out) {
  __shared__ int x[64];
  x[threadIdx.x] = int(threadIdx.x);
  out[threadIdx.x] = x[63 - threadIdx.x];
}

__global__ void no_warp_barrier_kernel(int* out) {
  __shared__ int x[64];
  x[threadIdx.x] = __shfl_sync(0xffffffffu, int(threadIdx.x), 3);
  out[threadIdx.x] = x[threadIdx.x ^ 1];
}

__global__ void unwritten_kernel(int* out) {
  __shared__ int x[64];
  if (threadIdx.x > 0) x[threadIdx.x] = 7;
  __syncthreads();
  out[threadIdx.x] = x[0];
}

__global__ void early_end_kernel(int* out) {
  if (threadIdx.x >= 32) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void divergent_kernel(int* out) {
  int x = int(threadIdx.x);
  if (threadIdx.x & 1) {
    x = __shfl_xor_sync(0xffffffffu, x, 2);
  } else {
    x = __shfl_xor_sync(0xffffffffu, x, 4);
  }
  out[threadIdx.x] = x;
}

__global__ void misaligned_kernel(int* out) { out[threadIdx.x] = int(load_stream(out + 1).x); }

__global__ void no_expect_kernel(int* out) {
  __shared__ float4 from_other;
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier);
    barriers_are_made();
  }
  __syncthreads();
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x == 0) send_remote(&from_other, &barrier, 1 - blockIdx.x, float4{1, 2, 3, 4});
  barrier_wait(&barrier, 0);
  out[threadIdx.x] = int(from_other.x);
}

__global__ void ended_block_kernel(int*) {
  __shared__ float4 from_other;
  cluster_arrive();
  if (blockIdx.x == 0) return;
  cluster_wait();
  if (threadIdx.x == 0) store_remote(&from_other, 0, float4{});
}

}  // namespace
}  // namespace rl

// A launch of 64 threads (two blocks of as many in a cluster); `out` holds 64 ints.
extern "C" __attribute__((visibility("default"))) int rl_emulated_fault(int number, int* out) {
  using namespace rl;
  constexpr void (*kAlone[])(int*) = {no_barrier_kernel, no_warp_barrier_kernel, unwritten_kernel, early_end_kernel, divergent_kernel, misaligned_kernel};
  constexpr void (*kInCluster[])(int*) = {no_expect_kernel, ended_block_kernel};
  if (number < 6) return launch(kAlone[number], 1, 64, nullptr, out);
  return launch_clusters(kInCluster[number - 6], {2, 64, 0}, 1, nullptr, out);
}
