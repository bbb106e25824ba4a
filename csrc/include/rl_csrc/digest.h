// The position-keyed 64-bit digest of FRAMES.md. Plain C++, no Python: another binding or a CUDA kernel can share it.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define RL_HOST_DEVICE __host__ __device__
#else
#define RL_HOST_DEVICE
#endif

namespace rl {

constexpr std::uint64_t kDigestKeyStep = 0x9E3779B97F4A7C15ull;
constexpr std::uint64_t kDigestMultiplier = 0xD6E8FEB86659FD93ull;

RL_HOST_DEVICE inline std::uint64_t digest_mix(std::uint64_t x) {
  x = (x ^ (x >> 32)) * kDigestMultiplier;
  x = (x ^ (x >> 32)) * kDigestMultiplier;
  return x ^ (x >> 32);
}

// The term that the word at position `index` of a stream adds to the sum.
RL_HOST_DEVICE inline std::uint64_t digest_word(std::uint64_t word, std::uint64_t index) {
  return digest_mix(word ^ ((index + 1) * kDigestKeyStep));
}

RL_HOST_DEVICE inline std::uint64_t digest_finish(std::uint64_t sum, std::uint64_t nbytes) {
  return digest_mix(sum + (nbytes + 1) * kDigestKeyStep);
}

// The multiplier's inverse modulo 2**64, by Newton's iteration: each step doubles the bits that are right, from 3.
constexpr std::uint64_t digest_inverse_multiplier() {
  std::uint64_t inverse = kDigestMultiplier;
  for (int step = 0; step < 5; ++step) inverse *= 2 - kDigestMultiplier * inverse;
  return inverse;
}
static_assert(digest_inverse_multiplier() * kDigestMultiplier == 1);

// The sum that digest_finish turned into this digest: mixing loses nothing.
inline std::uint64_t digest_resume(std::uint64_t digest, std::uint64_t nbytes) {
  std::uint64_t x = digest ^ (digest >> 32);
  for (int round = 0; round < 2; ++round) {
    x *= digest_inverse_multiplier();
    x ^= x >> 32;
  }
  return x - (nbytes + 1) * kDigestKeyStep;
}

// Sum of the terms of `nbytes` bytes that start at word `first_word` of their stream; a short last word is zero-extended.
std::uint64_t digest_sum(const void* data, std::size_t nbytes, std::uint64_t first_word);

// Sum of the terms of the zero words [first_word, last_word).
std::uint64_t digest_zeros(std::uint64_t first_word, std::uint64_t last_word);

// Copy and digest in one pass over the source. Ranges must not overlap.
std::uint64_t digest_copy(void* dst, const void* src, std::size_t nbytes, std::uint64_t first_word);

}  // namespace rl
