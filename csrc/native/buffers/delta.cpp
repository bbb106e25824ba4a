#include "rl_csrc/delta.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "isa.h"
#include "simd.h"

namespace rl {
namespace {

constexpr std::size_t kAhead = 2048;  // bytes to prefetch
constexpr std::size_t kBlock = 64;    // bytes compared at a time

// One bit per element of a block: whether it differs.
template <std::size_t kItem>
inline std::uint64_t differs_baseline(const unsigned char* a, const unsigned char* b) {
  std::uint64_t mask = 0;
  for (std::size_t word = 0; word < kBlock / 8; ++word) {
    std::uint64_t x, y;
    std::memcpy(&x, a + 8 * word, 8);
    std::memcpy(&y, b + 8 * word, 8);
    if (x == y) continue;
    for (std::size_t i = 0; i < 8 / kItem; ++i)
      if (std::memcmp(a + 8 * word + i * kItem, b + 8 * word + i * kItem, kItem) != 0) mask |= 1ull << (word * (8 / kItem) + i);
  }
  return mask;
}

#if defined(__x86_64__)
template <std::size_t kItem>
__attribute__((target("avx2,bmi2"))) inline std::uint64_t half_avx2(const unsigned char* a, const unsigned char* b) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
  if constexpr (kItem == 8) return static_cast<std::uint64_t>(~_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(x, y))) & 0xF);
  if constexpr (kItem == 4) return static_cast<std::uint64_t>(~_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(x, y))) & 0xFF);
  const __m256i same = kItem == 2 ? _mm256_cmpeq_epi16(x, y) : _mm256_cmpeq_epi8(x, y);
  const auto bytes = ~static_cast<std::uint32_t>(_mm256_movemask_epi8(same));
  return kItem == 2 ? _pext_u32(bytes, 0x55555555) : bytes;
}

template <std::size_t kItem>
__attribute__((target("avx2,bmi2"))) inline std::uint64_t differs_avx2(const unsigned char* a, const unsigned char* b) {
  return half_avx2<kItem>(a, b) | half_avx2<kItem>(a + 32, b + 32) << (32 / kItem);
}

template <std::size_t kItem>
__attribute__((target("avx512f,avx512bw,bmi2"))) inline std::uint64_t differs_avx512(const unsigned char* a, const unsigned char* b) {
  const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
  if constexpr (kItem == 1) return _mm512_cmpneq_epi8_mask(x, y);
  if constexpr (kItem == 2) return _mm512_cmpneq_epi16_mask(x, y);
  if constexpr (kItem == 4) return _mm512_cmpneq_epi32_mask(x, y);
  return _mm512_cmpneq_epi64_mask(x, y);
}
#endif

// What one chunk has yielded so far, in scratch memory that has room for a chunk in which everything changed.
struct Sink {
  unsigned char* gap;
  unsigned char* value;
  std::size_t next;  // element behind the last one named

  template <std::size_t kItem>
  void take(std::uint64_t mask, std::size_t first, const unsigned char* block) {
    for (; mask; mask &= mask - 1) {
      const auto i = static_cast<std::size_t>(std::countr_zero(mask));
      std::size_t skip = first + i - next;
      for (; skip >= 255; skip -= 255) *gap++ = 255;
      *gap++ = static_cast<unsigned char>(skip);
      next = first + i + 1;
      std::memcpy(value, block + i * kItem, kItem);
      value += kItem;
    }
  }
};

// Each level compiles the same loop, so that the comparison is inlined into it.
#define RL_DELTA_SCAN(name, attribute, differs)                                                                     \
  template <std::size_t kItem>                                                                                      \
  attribute void name(const unsigned char* fresh, const unsigned char* base, std::size_t num_blocks, Sink& sink) {  \
    constexpr std::size_t kPerBlock = kBlock / kItem;                                                               \
    for (std::size_t k = 0; k < num_blocks; ++k) {                                                                  \
      __builtin_prefetch(fresh + k * kBlock + kAhead);                                                              \
      __builtin_prefetch(base + k * kBlock + kAhead);                                                               \
      const std::uint64_t mask = differs<kItem>(fresh + k * kBlock, base + k * kBlock);                             \
      if (mask) sink.take<kItem>(mask, k * kPerBlock, fresh + k * kBlock);                                          \
    }                                                                                                               \
  }

RL_DELTA_SCAN(scan_baseline, , differs_baseline)
#if defined(__x86_64__)
RL_DELTA_SCAN(scan_avx2, __attribute__((target("avx2,bmi2"))), differs_avx2)
RL_DELTA_SCAN(scan_avx512, __attribute__((target("avx512f,avx512bw,bmi2"))), differs_avx512)
#endif
#undef RL_DELTA_SCAN

template <std::size_t kItem>
void scan(const unsigned char* fresh, const unsigned char* base, std::size_t count, Sink& sink) {
  const std::size_t num_blocks = count * kItem / kBlock, done = num_blocks * kBlock;
#if defined(__x86_64__)
  if (isa() == Isa::avx512)
    scan_avx512<kItem>(fresh, base, num_blocks, sink);
  else if (isa() == Isa::avx2)
    scan_avx2<kItem>(fresh, base, num_blocks, sink);
  else
#endif
    scan_baseline<kItem>(fresh, base, num_blocks, sink);
  for (std::size_t i = done / kItem; i < count; ++i)
    if (std::memcmp(fresh + i * kItem, base + i * kItem, kItem) != 0) sink.take<kItem>(1, i, fresh + i * kItem);
}

template <std::size_t kItem>
bool encode(const unsigned char* fresh, const unsigned char* base, std::size_t num_elements, DeltaChunk* table, unsigned char* gaps,
            unsigned char* values, std::size_t capacity, unsigned char* scratch, DeltaSizes& sizes) {
  std::size_t gap_nbytes = 0, value_nbytes = 0;
  unsigned char* const scratch_values = scratch + kDeltaChunk + 64;
  for (std::size_t start = 0; start < num_elements; start += kDeltaChunk, ++table) {
    Sink sink{scratch, scratch_values, 0};
    scan<kItem>(fresh + start * kItem, base + start * kItem, std::min(kDeltaChunk, num_elements - start), sink);
    const auto new_gaps = static_cast<std::size_t>(sink.gap - scratch), new_values = static_cast<std::size_t>(sink.value - scratch_values);
    if (gap_nbytes + new_gaps + value_nbytes + new_values > capacity) return false;
    *table = {static_cast<std::uint32_t>(new_values / kItem), static_cast<std::uint32_t>(new_gaps)};
    if (new_values) {
      std::memcpy(gaps + gap_nbytes, scratch, new_gaps);
      std::memcpy(values + value_nbytes, scratch_values, new_values);
    }
    gap_nbytes += new_gaps;
    value_nbytes += new_values;
  }
  sizes = {gap_nbytes, value_nbytes / kItem};
  return true;
}

// Positions are decoded a batch ahead, so that the lines they lie in are on their way when they are written.
template <std::size_t kItem>
void apply(unsigned char* target, const DeltaChunk* table, std::size_t num_chunks, const unsigned char* gaps, const unsigned char* values) {
  constexpr std::size_t kBatch = 64;
  std::uint32_t positions[kBatch];
  for (std::size_t c = 0; c < num_chunks; ++c, target += kDeltaChunk * kItem) {
    const unsigned char* const end = gaps + table[c].gap_nbytes;
    std::uint32_t position = 0;
    while (gaps < end) {
      std::size_t n = 0;
      for (; gaps < end && n < kBatch; ++gaps) {
        position += *gaps;
        if (*gaps == 255) continue;
        __builtin_prefetch(target + position * kItem, 1);
        positions[n++] = position++;
      }
      for (std::size_t i = 0; i < n; ++i, values += kItem) std::memcpy(target + positions[i] * kItem, values, kItem);
    }
  }
}

}  // namespace

bool delta_encode(const void* fresh, const void* base, std::size_t num_elements, std::size_t item_nbytes, DeltaChunk* table,
                  unsigned char* gaps, unsigned char* values, std::size_t capacity, unsigned char* scratch, DeltaSizes& sizes) {
  const auto* a = static_cast<const unsigned char*>(fresh);
  const auto* b = static_cast<const unsigned char*>(base);
  switch (item_nbytes) {
    case 1: return encode<1>(a, b, num_elements, table, gaps, values, capacity, scratch, sizes);
    case 2: return encode<2>(a, b, num_elements, table, gaps, values, capacity, scratch, sizes);
    case 4: return encode<4>(a, b, num_elements, table, gaps, values, capacity, scratch, sizes);
    default: return encode<8>(a, b, num_elements, table, gaps, values, capacity, scratch, sizes);
  }
}

std::string delta_check(const DeltaChunk* table, std::size_t num_chunks, const unsigned char* gaps, std::size_t gap_nbytes,
                        std::size_t num_values, std::size_t num_elements) {
  if (num_chunks != delta_num_chunks(num_elements)) return "the delta is of a tensor with another number of elements";
  std::uint64_t changed = 0, used = 0;
  for (std::size_t c = 0; c < num_chunks; ++c) {
    const DeltaChunk chunk = table[c];
    if (chunk.gap_nbytes > gap_nbytes - used) return "chunk " + std::to_string(c) + " has more gaps than there are";
    // The last named element lies at the sum of all steps; if that one is inside, all are.
    std::uint64_t sum = 0, named = 0;
    for (std::uint32_t i = 0; i < chunk.gap_nbytes; ++i) {
      const unsigned char gap = gaps[used + i];
      sum += gap;
      named += gap != 255;
    }
    const std::size_t length = std::min(kDeltaChunk, num_elements - c * kDeltaChunk);
    if (named != chunk.num_changed || sum + named > length) return "chunk " + std::to_string(c) + " names elements that it does not have";
    used += chunk.gap_nbytes;
    changed += named;
  }
  if (used != gap_nbytes || changed != num_values) return "there are gaps or values that belong to no chunk";
  return {};
}

void delta_apply(void* target, std::size_t item_nbytes, const DeltaChunk* table, std::size_t num_chunks,
                 const unsigned char* gaps, const unsigned char* values) {
  auto* t = static_cast<unsigned char*>(target);
  switch (item_nbytes) {
    case 1: return apply<1>(t, table, num_chunks, gaps, values);
    case 2: return apply<2>(t, table, num_chunks, gaps, values);
    case 4: return apply<4>(t, table, num_chunks, gaps, values);
    default: return apply<8>(t, table, num_chunks, gaps, values);
  }
}

}  // namespace rl
