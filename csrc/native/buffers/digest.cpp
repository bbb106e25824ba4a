// CPU paths of the digest. Each level sums the same terms, so the results are equal to the bit.
#include "rl_csrc/digest.h"

#include <cstring>

#include "isa.h"
#include "simd.h"

namespace rl {
namespace {

constexpr std::size_t kAhead = 4096;  // bytes to prefetch ahead: the hardware's own reach stops at the end of a page

template <bool kCopy>
std::uint64_t sum_baseline(unsigned char* dst, const unsigned char* src, std::size_t words, std::uint64_t key) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < words; ++i, key += kDigestKeyStep) {
    if (i % 8 == 0) __builtin_prefetch(src + 8 * i + kAhead);
    std::uint64_t x;
    std::memcpy(&x, src + 8 * i, 8);
    if constexpr (kCopy) std::memcpy(dst + 8 * i, &x, 8);
    sum += digest_mix(x ^ key);
  }
  return sum;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline __m256i round_avx2(__m256i x, __m256i low, __m256i high) {
  const __m256i top = _mm256_srli_epi64(x, 32);
  x = _mm256_xor_si256(x, top);
  const __m256i cross = _mm256_add_epi64(_mm256_mul_epu32(top, low), _mm256_mul_epu32(x, high));
  return _mm256_add_epi64(_mm256_mul_epu32(x, low), _mm256_slli_epi64(cross, 32));
}

template <bool kCopy>
__attribute__((target("avx2"))) std::uint64_t sum_avx2(unsigned char* dst, const unsigned char* src, std::size_t words,
                                                       std::uint64_t key) {
  const __m256i low = _mm256_set1_epi64x(static_cast<long long>(kDigestMultiplier & 0xFFFFFFFF));
  const __m256i high = _mm256_set1_epi64x(static_cast<long long>(kDigestMultiplier >> 32));
  const __m256i step = _mm256_set1_epi64x(static_cast<long long>(4 * kDigestKeyStep));
  __m256i keys = _mm256_set_epi64x(static_cast<long long>(key + 3 * kDigestKeyStep), static_cast<long long>(key + 2 * kDigestKeyStep),
                                   static_cast<long long>(key + kDigestKeyStep), static_cast<long long>(key));
  __m256i sum = _mm256_setzero_si256();
  const std::size_t body = words / 4 * 4;
  for (std::size_t i = 0; i < body; i += 4) {
    if (i % 8 == 0) __builtin_prefetch(src + 8 * i + kAhead);
    __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 8 * i));
    if constexpr (kCopy) _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 8 * i), x);
    x = round_avx2(round_avx2(_mm256_xor_si256(x, keys), low, high), low, high);
    sum = _mm256_add_epi64(sum, _mm256_xor_si256(x, _mm256_srli_epi64(x, 32)));
    keys = _mm256_add_epi64(keys, step);
  }
  alignas(32) std::uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3] +
         sum_baseline<kCopy>(kCopy ? dst + 8 * body : nullptr, src + 8 * body, words - body, key + body * kDigestKeyStep);
}

__attribute__((target("avx512f,avx512dq"))) inline __m512i mix_avx512(__m512i x, __m512i multiplier) {
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 32)), multiplier);
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 32)), multiplier);
  return _mm512_xor_si512(x, _mm512_srli_epi64(x, 32));
}

enum class Store { none, cached, streaming };

// Streaming stores do not read the destination's lines first; they want it aligned to 64 bytes.
template <Store kStore>
__attribute__((target("avx512f,avx512dq"))) std::uint64_t sum_avx512(unsigned char* dst, const unsigned char* src,
                                                                     std::size_t words, std::uint64_t key) {
  const __m512i multiplier = _mm512_set1_epi64(static_cast<long long>(kDigestMultiplier));
  const __m512i lane = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i one_step = _mm512_set1_epi64(static_cast<long long>(kDigestKeyStep));
  const __m512i step8 = _mm512_set1_epi64(static_cast<long long>(8 * kDigestKeyStep));
  const __m512i step16 = _mm512_set1_epi64(static_cast<long long>(16 * kDigestKeyStep));
  __m512i keys0 = _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(key)), _mm512_mullo_epi64(lane, one_step));
  __m512i keys1 = _mm512_add_epi64(keys0, step8);
  __m512i sum0 = _mm512_setzero_si512(), sum1 = _mm512_setzero_si512();
  const std::size_t body = words / 16 * 16;
  for (std::size_t i = 0; i < body; i += 16) {
    __builtin_prefetch(src + 8 * i + kAhead);
    __builtin_prefetch(src + 8 * i + kAhead + 64);
    const __m512i x0 = _mm512_loadu_si512(src + 8 * i);
    const __m512i x1 = _mm512_loadu_si512(src + 8 * i + 64);
    if constexpr (kStore == Store::cached) {
      _mm512_storeu_si512(dst + 8 * i, x0);
      _mm512_storeu_si512(dst + 8 * i + 64, x1);
    } else if constexpr (kStore == Store::streaming) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 8 * i), x0);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 8 * i + 64), x1);
    }
    sum0 = _mm512_add_epi64(sum0, mix_avx512(_mm512_xor_si512(x0, keys0), multiplier));
    sum1 = _mm512_add_epi64(sum1, mix_avx512(_mm512_xor_si512(x1, keys1), multiplier));
    keys0 = _mm512_add_epi64(keys0, step16);
    keys1 = _mm512_add_epi64(keys1, step16);
  }
  if constexpr (kStore == Store::streaming) _mm_sfence();
  alignas(64) std::uint64_t lanes[8];  // summed here: _mm512_reduce_add_epi64 overflows as signed numbers do
  _mm512_store_si512(lanes, _mm512_add_epi64(sum0, sum1));
  std::uint64_t sum = 0;
  for (std::uint64_t lane : lanes) sum += lane;
  unsigned char* const rest = kStore == Store::none ? nullptr : dst + 8 * body;
  return sum + sum_baseline<kStore != Store::none>(rest, src + 8 * body, words - body, key + body * kDigestKeyStep);
}
#endif

// From here on past the cache. What is copied with a digest goes to another process or to memory that is not read soon, and
// a core reads lines that are modified in another's cache more slowly than memory.
constexpr std::size_t kStreamingBytes = std::size_t{64} << 10;

template <bool kCopy>
std::uint64_t sum_words(unsigned char* dst, const unsigned char* src, std::size_t words, std::uint64_t key) {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::avx512:
      if constexpr (!kCopy) return sum_avx512<Store::none>(nullptr, src, words, key);
      if (8 * words >= kStreamingBytes && reinterpret_cast<std::uintptr_t>(dst) % 64 == 0)
        return sum_avx512<Store::streaming>(dst, src, words, key);
      return sum_avx512<Store::cached>(dst, src, words, key);
    case Isa::avx2:
      return sum_avx2<kCopy>(dst, src, words, key);
    default:
      break;
  }
#endif
  return sum_baseline<kCopy>(dst, src, words, key);
}

template <bool kCopy>
std::uint64_t sum_bytes(unsigned char* dst, const unsigned char* src, std::size_t nbytes, std::uint64_t first_word) {
  const std::size_t words = nbytes / 8, tail = nbytes % 8;
  std::uint64_t sum = words ? sum_words<kCopy>(dst, src, words, (first_word + 1) * kDigestKeyStep) : 0;
  if (tail) {
    std::uint64_t last = 0;
    std::memcpy(&last, src + 8 * words, tail);
    if constexpr (kCopy) std::memcpy(dst + 8 * words, &last, tail);
    sum += digest_word(last, first_word + words);
  }
  return sum;
}

}  // namespace

std::uint64_t digest_sum(const void* data, std::size_t nbytes, std::uint64_t first_word) {
  return sum_bytes<false>(nullptr, static_cast<const unsigned char*>(data), nbytes, first_word);
}

std::uint64_t digest_zeros(std::uint64_t first_word, std::uint64_t last_word) {
  std::uint64_t sum = 0;
  for (std::uint64_t i = first_word; i < last_word; ++i) sum += digest_word(0, i);
  return sum;
}

std::uint64_t digest_copy(void* dst, const void* src, std::size_t nbytes, std::uint64_t first_word) {
  return sum_bytes<true>(static_cast<unsigned char*>(dst), static_cast<const unsigned char*>(src), nbytes, first_word);
}

}  // namespace rl
