// Which instruction set a CPU path may use. Detected once; lowered (never raised) for tests by set_isa.
#pragma once
#include <algorithm>
#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace rl {

enum class Isa : int { baseline = 0, avx2 = 1, avx512 = 2 };

// Levels of the setting above avx512: its products of bf16 pairs, and the tile unit, granted to this process by the kernel.
// Kernels that know neither read them as avx512.
constexpr int kBf16Level = 3;
constexpr int kAmxLevel = 4;

inline bool detect_bf16() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & (1u << 5));  // AVX512_BF16
#else
  return false;
#endif
}

inline bool detect_amx() {
#if defined(__x86_64__) && defined(__linux__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  const bool has_tiles = (edx & (1u << 24)) && (edx & (1u << 22));
  if (!has_tiles) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

inline Isa detect_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi2"))
    return Isa::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2"))  // F16C is older than AVX2 on every processor; clang 14 cannot ask for it
    return Isa::avx2;
#endif
  return Isa::baseline;
}

inline int detect_level() {
  static const int level = detect_isa() != Isa::avx512 || !detect_bf16() ? static_cast<int>(detect_isa())
                           : detect_amx()                                ? kAmxLevel
                                                                         : kBf16Level;
  return level;
}

inline std::atomic<int>& isa_setting() {
  static std::atomic<int> level{detect_level()};
  return level;
}

inline int isa_level() { return isa_setting().load(std::memory_order_relaxed); }

inline Isa isa() { return static_cast<Isa>(std::min(isa_level(), static_cast<int>(Isa::avx512))); }

// Returns the level now in force: the asked one, or the machine's if that is lower or the asked one is negative.
inline int set_isa_level(int level) {
  const int best = detect_level();
  isa_setting().store(level < 0 || level > best ? best : level, std::memory_order_relaxed);
  return isa_level();
}

inline Isa set_isa(int level) {
  set_isa_level(level);
  return isa();
}

}  // namespace rl
