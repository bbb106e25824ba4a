// Device memory at an address that stays: the driver's virtual memory management. The driver's functions are asked of the runtime, so
// that the module loads where there is no driver.
#include "launch.cuh"

#ifndef RL_CSRC_EMULATED
#include <cuda.h>
#endif

namespace rl {
namespace {

#ifdef RL_CSRC_EMULATED
#define RL_DRIVER(name) &name
#else
// The driver's function `name`, or nullptr.
void* driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr;
}
#define RL_DRIVER(name) reinterpret_cast<decltype(&name)>(rl::driver_function(#name))
#endif

// Calls a function of the driver; cudaErrorNotSupported where it has none of that name.
template <typename F, typename... Args>
int call(F* function, Args... args) {
  return function == nullptr ? int(cudaErrorNotSupported) : int(function(args...));
}

CUmemLocation on_device(int device) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  return location;
}

CUmemAllocationProp pinned_on(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = on_device(device);
  return properties;
}

}  // namespace
}  // namespace rl

extern "C" int rl_cuda_map_granularity(int32_t device, uint64_t* nbytes) {
  const CUmemAllocationProp properties = rl::pinned_on(device);
  size_t found = 0;
  const int status = rl::call(RL_DRIVER(cuMemGetAllocationGranularity), &found, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  *nbytes = found;
  return status;
}

extern "C" int rl_cuda_map_reserve(uint64_t nbytes, uint64_t* address) {
  CUdeviceptr found = 0;
  const int status = rl::call(RL_DRIVER(cuMemAddressReserve), &found, size_t(nbytes), size_t(0), CUdeviceptr(0), 0ull);
  *address = found;
  return status;
}

extern "C" int rl_cuda_map_take(int32_t device, uint64_t address, uint64_t nbytes, uint64_t* handle) {
  const CUmemAllocationProp properties = rl::pinned_on(device);
  CUmemGenericAllocationHandle memory{};
  if (const int status = rl::call(RL_DRIVER(cuMemCreate), &memory, size_t(nbytes), &properties, 0ull)) return status;
  int status = rl::call(RL_DRIVER(cuMemMap), CUdeviceptr(address), size_t(nbytes), size_t(0), memory, 0ull);
  if (status == 0) {
    CUmemAccessDesc access{};
    access.location = rl::on_device(device);
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    status = rl::call(RL_DRIVER(cuMemSetAccess), CUdeviceptr(address), size_t(nbytes), &access, size_t(1));
    if (status) rl::call(RL_DRIVER(cuMemUnmap), CUdeviceptr(address), size_t(nbytes));
  }
  if (status) rl::call(RL_DRIVER(cuMemRelease), memory);
  *handle = uint64_t(memory);
  return status;
}

extern "C" int rl_cuda_map_give(uint64_t address, uint64_t nbytes, uint64_t handle) {
  const int status = rl::call(RL_DRIVER(cuMemUnmap), CUdeviceptr(address), size_t(nbytes));
  return status ? status : rl::call(RL_DRIVER(cuMemRelease), CUmemGenericAllocationHandle(handle));
}

extern "C" int rl_cuda_map_free(uint64_t address, uint64_t nbytes) {
  return rl::call(RL_DRIVER(cuMemAddressFree), CUdeviceptr(address), size_t(nbytes));
}
