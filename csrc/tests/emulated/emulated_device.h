// A GPU of compute capability 9.0 on a CPU, as far as the kernels of native/cuda use one: this header takes the place of CUDA's own
// and of the PTX in device.cuh. Threads are fibers, run one at a time by scheduler.cpp.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <source_location>
#include <tuple>
#include <type_traits>
#include <utility>

#define __CUDA_ARCH__ 900
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local  // the scheduler exchanges the thread's variables when it changes blocks
#define RL_CONSTANT_PARAMETER(type) const type&

using std::max;
using std::min;

// ---- types and conversions -------------------------------------------------------------------------------------------

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename To, typename From>
To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __uint_as_float(uint32_t x) { return same_bits<float>(x); }
inline uint32_t __float_as_uint(float x) { return same_bits<uint32_t>(x); }

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  if (isnan(x)) return {0x7fff};
  const uint32_t bits = __float_as_uint(x);
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
inline float __half2float(__half x) { return float(same_bits<_Float16>(x)); }
inline __half __float2half_rn(float x) { return isnan(x) ? __half{0x7fff} : same_bits<__half>(_Float16(x)); }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }

inline float nan_or_max(float a, float b) { return isnan(a) || isnan(b) ? NAN : a > b ? a : b; }
inline __nv_bfloat162 __hmax2_nan(__nv_bfloat162 a, __nv_bfloat162 b) {
  const auto larger = [](__nv_bfloat16 p, __nv_bfloat16 q) { return __float2bfloat16_rn(nan_or_max(__bfloat162float(p), __bfloat162float(q))); };
  return {larger(a.x, b.x), larger(a.y, b.y)};
}
inline __half2 __hmax2_nan(__half2 a, __half2 b) {
  const auto larger = [](__half p, __half q) { return __float2half_rn(nan_or_max(__half2float(p), __half2float(q))); };
  return {larger(a.x, b.x), larger(a.y, b.y)};
}

inline float rsqrtf(float x) { return 1.f / sqrtf(x); }

inline int __ffs(uint32_t x) { return __builtin_ffs(int(x)); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }
inline uint32_t __funnelshift_r(uint32_t lo, uint32_t hi, unsigned shift) { return uint32_t((uint64_t(hi) << 32 | lo) >> (shift & 31)); }

// ---- what the scheduler does -----------------------------------------------------------------------------------------

namespace emulated {

using Site = std::source_location;

struct Index {
  unsigned x, y, z;
};

struct Shape {
  int64_t blocks;
  int threads, cluster, shared_bytes;
};

// Runs a grid whose threads each call `body(context)`; a cudaError_t.
int run(const void* kernel, const Shape& shape, void (*body)(void*), void* context);
int count_resident(const Shape& shape, int* clusters);

// Ends the launch: a fault of the thread that runs.
[[noreturn]] void fault(const char* what, const Site& at);

// Meets the other threads of the warp, each with a value; what all gave, by lane.
const uint64_t* meet_warp(const char* what, unsigned mask, uint64_t value, const Site& at);
void meet_block(const Site& at);
void arrive_at_cluster(const Site& at);
void wait_for_cluster(const Site& at);
void* added_shared();
void store_remote(void* p, uint64_t* barrier, unsigned rank, const float4& v, const Site& at);
void fetch_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier, const Site& at);
void barrier_init(uint64_t* barrier, const Site& at);
void barrier_expect(uint64_t* barrier, uint32_t bytes, const Site& at);
void barrier_wait(uint64_t* barrier, unsigned parity, const Site& at);

// A GPU faults where an address is no multiple of the access's size.
template <typename T>
T* aligned(T* p, const Site& at) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) fault("a misaligned address", at);
  return p;
}

}  // namespace emulated

extern emulated::Index threadIdx, blockIdx, blockDim, gridDim;

// ---- intrinsics ------------------------------------------------------------------------------------------------------

#define RL_SITE const emulated::Site &at = emulated::Site::current()

inline void __syncthreads(RL_SITE) { emulated::meet_block(at); }
inline void __syncwarp(unsigned mask = 0xffffffffu, RL_SITE) { emulated::meet_warp("__syncwarp", mask, 0, at); }
inline void __threadfence() {}

template <typename T>
T shuffled(const char* what, unsigned mask, T x, int from, RL_SITE) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint64_t mine = 0;
  memcpy(&mine, &x, sizeof x);
  const uint64_t* all = emulated::meet_warp(what, mask, mine, at);
  if (from >= 0 && from < 32) memcpy(&x, all + from, sizeof x);
  return x;
}
inline int lane_of() { return int(threadIdx.x & 31); }
template <typename T>
T __shfl_sync(unsigned mask, T x, int lane, RL_SITE) { return shuffled("__shfl_sync", mask, x, lane & 31, at); }
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int bits, RL_SITE) { return shuffled("__shfl_xor_sync", mask, x, lane_of() ^ bits, at); }
template <typename T>
T __shfl_up_sync(unsigned mask, T x, int step, RL_SITE) { return shuffled("__shfl_up_sync", mask, x, lane_of() - step, at); }
template <typename T>
T __shfl_down_sync(unsigned mask, T x, int step, RL_SITE) { return shuffled("__shfl_down_sync", mask, x, lane_of() + step, at); }
inline unsigned __ballot_sync(unsigned mask, bool vote, RL_SITE) {
  const uint64_t* all = emulated::meet_warp("__ballot_sync", mask, vote, at);
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= unsigned(all[lane] != 0) << lane;
  return votes;
}
inline bool __any_sync(unsigned mask, bool vote, RL_SITE) { return __ballot_sync(mask, vote, at) != 0; }

template <typename T>
T atomicAdd(T* p, std::type_identity_t<T> x) {
  const T old = *p;
  *p = old + x;
  return old;
}
template <typename T>
T __ldcg(const T* p, RL_SITE) { return *emulated::aligned(p, at); }
template <typename T>
T __ldcs(const T* p, RL_SITE) { return *emulated::aligned(p, at); }
template <typename T>
void __stcs(T* p, const T& x, RL_SITE) { *emulated::aligned(p, at) = x; }

// ---- the CUDA runtime ------------------------------------------------------------------------------------------------

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801
};
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor = 75 };

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);  // of a launch that failed: what its threads did
int cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
inline int cudaGetDevice(int* device) { return *device = 0; }
inline int cudaRuntimeGetVersion(int* version) { return *version = 0; }

// ---- the driver's virtual memory management (driver.cpp) -------------------------------------------------------------

using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_OUT_OF_MEMORY = 2 };
enum CUmemAllocationType { CU_MEM_ALLOCATION_TYPE_PINNED = 1 };
enum CUmemLocationType { CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum CUmemAllocationGranularity_flags { CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1 };
enum CUmemAccess_flags { CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 };
struct CUmemLocation {
  CUmemLocationType type;
  int id;
};
struct CUmemAllocationProp {
  CUmemAllocationType type;
  CUmemLocation location;
};
struct CUmemAccessDesc {
  CUmemLocation location;
  CUmemAccess_flags flags;
};
CUresult cuMemGetAllocationGranularity(size_t* nbytes, const CUmemAllocationProp* properties, CUmemAllocationGranularity_flags kind);
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t nbytes, size_t alignment, CUdeviceptr hint, unsigned long long flags);
CUresult cuMemCreate(CUmemGenericAllocationHandle* memory, size_t nbytes, const CUmemAllocationProp* properties, unsigned long long flags);
CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset, CUmemGenericAllocationHandle memory, unsigned long long flags);
CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc* access, size_t count);
CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes);
CUresult cuMemRelease(CUmemGenericAllocationHandle memory);
CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes);

// ---- the names of device.cuh -----------------------------------------------------------------------------------------

namespace rl {

inline float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.f : y;  // denormal results are flushed
}
inline float max_nan(float a, float b) { return nan_or_max(a, b); }
inline uint4 load_stream(const void* p, RL_SITE) { return *emulated::aligned(static_cast<const uint4*>(p), at); }

inline uint4* dynamic_shared() { return static_cast<uint4*>(emulated::added_shared()); }
inline void cluster_arrive(RL_SITE) { emulated::arrive_at_cluster(at); }
inline void cluster_wait(RL_SITE) { emulated::wait_for_cluster(at); }
inline void store_remote(void* p, unsigned rank, const float4& v, RL_SITE) { emulated::store_remote(p, nullptr, rank, v, at); }
inline void send_remote(void* p, uint64_t* barrier, unsigned rank, const float4& v, RL_SITE) {
  emulated::store_remote(p, barrier, rank, v, at);
}
inline void barrier_init(uint64_t* barrier, RL_SITE) { emulated::barrier_init(barrier, at); }
inline void barriers_are_made() {}
inline void barrier_expect(uint64_t* barrier, uint32_t bytes, RL_SITE) { emulated::barrier_expect(barrier, bytes, at); }
inline void barrier_wait(uint64_t* barrier, unsigned parity, RL_SITE) { emulated::barrier_wait(barrier, parity, at); }
inline void fetch_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier, RL_SITE) {
  emulated::fetch_bulk(to, from, bytes, barrier, at);
}

struct Clusters {
  int size, threads, shared_bytes;
};

template <typename... Params, typename... Args>
int launch_shaped(void (*kernel)(Params...), const emulated::Shape& shape, Args&&... args) {
  const std::tuple<Params...> params(std::forward<Args>(args)...);
  auto body = [&] { std::apply(kernel, params); };
  return emulated::run(reinterpret_cast<const void*>(kernel), shape, [](void* context) { (*static_cast<decltype(body)*>(context))(); }, &body);
}

template <typename... Params, typename... Args>
int launch(void (*kernel)(Params...), int64_t blocks, int threads, void*, Args&&... args) {
  return launch_shaped(kernel, {blocks, threads, 1, 0}, std::forward<Args>(args)...);
}

template <typename... Params, typename... Args>
int launch_clusters(void (*kernel)(Params...), const Clusters& shape, int64_t clusters, void*, Args&&... args) {
  return launch_shaped(kernel, {clusters * shape.size, shape.threads, shape.size, shape.shared_bytes}, std::forward<Args>(args)...);
}

template <typename... Params>
int count_resident(void (*)(Params...), const Clusters& shape, int* clusters) {
  return emulated::count_resident({shape.size, shape.threads, shape.size, shape.shared_bytes}, clusters);
}

}  // namespace rl
