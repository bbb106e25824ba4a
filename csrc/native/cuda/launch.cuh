// Host helpers of the launch functions.
#pragma once
#include "device.cuh"
#include "rl_csrc/kernels_cuda.h"

namespace rl {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls f(T{}) with the element type that `dtype` names.
template <typename F>
int by_dtype(int dtype, F&& f) {
  switch (dtype) {
    case RL_F32: return f(float{});
    case RL_BF16: return f(__nv_bfloat16{});
    case RL_F16: return f(__half{});
    default: return int(cudaErrorInvalidValue);
  }
}

}  // namespace rl
