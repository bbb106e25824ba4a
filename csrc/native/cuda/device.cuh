// What the kernels and their launches ask of the GPU beyond C++: types and intrinsics, PTX, launches. A build with
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

// ---- launches --------------------------------------------------------------------------------------------------------

// Each returns the cudaError_t of the launch; arguments become the kernel's parameters before it returns.
template <typename... Params, typename... Args>
int launch(void (*kernel)(Params...), int64_t blocks, int threads, void* stream, Args&&... args) {
  if (blocks >= int64_t(1) << 31) return int(cudaErrorInvalidConfiguration);
  kernel<<<unsigned(blocks), unsigned(threads), 0, static_cast<cudaStream_t>(stream)>>>(std::forward<Args>(args)...);
  return int(cudaGetLastError());
}

}  // namespace rl
#endif  // RL_CSRC_EMULATED
