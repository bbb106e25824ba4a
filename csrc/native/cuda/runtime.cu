// What the binding asks of the CUDA runtime, so that it needs no CUDA headers.
#include "launch.cuh"

extern "C" const char* rl_cuda_error_name(int status) { return cudaGetErrorName(static_cast<cudaError_t>(status)); }

extern "C" const char* rl_cuda_error_text(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

extern "C" int rl_cuda_current_device(int* device) { return int(cudaGetDevice(device)); }

extern "C" int rl_cuda_runtime_version(int* version) { return int(cudaRuntimeGetVersion(version)); }

static_assert(RL_CUDA_NOT_SUPPORTED == int(cudaErrorNotSupported), "the header names this code without the runtime's");
static_assert(RL_CUDA_OUT_OF_MEMORY == int(cudaErrorMemoryAllocation), "and this one");
