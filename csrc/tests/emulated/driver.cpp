// The driver's virtual memory management on host memory: addresses are reserved without access, and memory that is mapped there is a
// file in memory, so that a use after `cuMemUnmap` is a fault of the process. Every call is written down; one can be made to fail.
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "emulated_device.h"

namespace {

constexpr size_t kGranularity = 1 << 16;
std::string calls, failing;
size_t taken = 0;

void* at(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

// Writes the call down; its status where it is to fail or a size is no multiple of the granularity.
CUresult note(const char* name, CUdeviceptr address, size_t nbytes) {
  calls += std::string(name) + " " + std::to_string(address) + " " + std::to_string(nbytes) + "\n";
  if (failing == name) return failing.clear(), CUDA_ERROR_OUT_OF_MEMORY;
  return nbytes % kGranularity ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult is(bool done) { return done ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

}  // namespace

CUresult cuMemGetAllocationGranularity(size_t* nbytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *nbytes = kGranularity;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t nbytes, size_t, CUdeviceptr, unsigned long long) {
  void* found = mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *address = reinterpret_cast<CUdeviceptr>(found);
  if (const CUresult status = note("reserve", *address, nbytes)) return status;
  return found == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* memory, size_t nbytes, const CUmemAllocationProp*, unsigned long long) {
  if (const CUresult status = note("create", 0, nbytes)) return status;
  const int file = memfd_create("emulated device memory", MFD_CLOEXEC);
  *memory = CUmemGenericAllocationHandle(file);
  taken += nbytes;
  return is(file >= 0 && ftruncate(file, off_t(nbytes)) == 0);
}

CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t, CUmemGenericAllocationHandle memory, unsigned long long) {
  if (const CUresult status = note("map", address, nbytes)) return status;
  return is(mmap(at(address), nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, int(memory), 0) != MAP_FAILED);
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc*, size_t) {
  if (const CUresult status = note("access", address, nbytes)) return status;
  return is(mprotect(at(address), nbytes, PROT_READ | PROT_WRITE) == 0);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes) {
  if (const CUresult status = note("unmap", address, nbytes)) return status;
  return is(mmap(at(address), nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle memory) {
  if (const CUresult status = note("release", 0, 0)) return status;
  taken -= size_t(lseek(int(memory), 0, SEEK_END));
  return is(close(int(memory)) == 0);
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
  if (const CUresult status = note("free", address, nbytes)) return status;
  return is(munmap(at(address), nbytes) == 0);
}

// The calls since the last time, one a line: name, address, bytes.
extern "C" const char* rl_emulated_driver_calls() {
  static std::string told;
  told.swap(calls);
  calls.clear();
  return told.c_str();
}

extern "C" void rl_emulated_driver_fail(const char* name) { failing = name; }

extern "C" uint64_t rl_emulated_driver_taken() { return taken; }
