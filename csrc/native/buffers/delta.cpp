#include "rl_csrc/delta.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "isa.h"
#include "rl_csrc/digest.h"
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

// Bringing one block of the base up to date: its bytes, and what its words add to the digest. `key` is that of the block's first word.
struct Advance {
  std::uint64_t sum = 0;

  void block(const unsigned char* fresh, unsigned char* base, std::uint64_t key) {
    for (std::size_t word = 0; word < kBlock / 8; ++word, key += kDigestKeyStep) {
      std::uint64_t x, y;
      std::memcpy(&x, fresh + 8 * word, 8);
      std::memcpy(&y, base + 8 * word, 8);
      if (x != y) sum += digest_mix(x ^ key) - digest_mix(y ^ key);
    }
    std::memcpy(base, fresh, kBlock);
  }
};

#if defined(__x86_64__)
#define RL_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,bmi2")))

RL_AVX512 inline __m512i mixed(const unsigned char* words, __m512i keys, __m512i multiplier) {
  __m512i x = _mm512_xor_si512(_mm512_loadu_si512(words), keys);
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 32)), multiplier);
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 32)), multiplier);
  return _mm512_xor_si512(x, _mm512_srli_epi64(x, 32));
}

template <std::size_t kItem>
RL_AVX512 std::uint64_t advance_avx512(const unsigned char* fresh, unsigned char* base, std::size_t num_blocks, std::uint64_t key, Sink& sink) {
  const __m512i multiplier = _mm512_set1_epi64(static_cast<long long>(kDigestMultiplier));
  const __m512i steps = _mm512_mullo_epi64(_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi64(static_cast<long long>(kDigestKeyStep)));
  __m512i sum = _mm512_setzero_si512();
  for (std::size_t k = 0; k < num_blocks; ++k, fresh += kBlock, base += kBlock) {
    __builtin_prefetch(fresh + kAhead);
    __builtin_prefetch(base + kAhead);
    const std::uint64_t mask = differs_avx512<kItem>(fresh, base);
    if (!mask) continue;
    sink.take<kItem>(mask, k * (kBlock / kItem), fresh);
    const __m512i keys = _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(key + 8 * k * kDigestKeyStep)), steps);
    sum = _mm512_add_epi64(sum, _mm512_sub_epi64(mixed(fresh, keys, multiplier), mixed(base, keys, multiplier)));
    _mm512_storeu_si512(base, _mm512_loadu_si512(fresh));
  }
  alignas(64) std::uint64_t lanes[8];
  _mm512_store_si512(lanes, sum);
  std::uint64_t total = 0;
  for (std::uint64_t lane : lanes) total += lane;
  return total;
}

template <std::size_t kItem>
__attribute__((target("avx2,bmi2"))) std::uint64_t advance_avx2(const unsigned char* fresh, unsigned char* base, std::size_t num_blocks,
                                                                std::uint64_t key, Sink& sink) {
  Advance advance;
  for (std::size_t k = 0; k < num_blocks; ++k, fresh += kBlock, base += kBlock) {
    __builtin_prefetch(fresh + kAhead);
    __builtin_prefetch(base + kAhead);
    const std::uint64_t mask = differs_avx2<kItem>(fresh, base);
    if (!mask) continue;
    sink.take<kItem>(mask, k * (kBlock / kItem), fresh);
    advance.block(fresh, base, key + 8 * k * kDigestKeyStep);
  }
  return advance.sum;
}
#endif

template <std::size_t kItem>
std::uint64_t advance_blocks(const unsigned char* fresh, unsigned char* base, std::size_t num_blocks, std::uint64_t key, Sink& sink) {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return advance_avx512<kItem>(fresh, base, num_blocks, key, sink);
  if (isa() == Isa::avx2) return advance_avx2<kItem>(fresh, base, num_blocks, key, sink);
#endif
  Advance advance;
  for (std::size_t k = 0; k < num_blocks; ++k, fresh += kBlock, base += kBlock) {
    const std::uint64_t mask = differs_baseline<kItem>(fresh, base);
    if (!mask) continue;
    sink.take<kItem>(mask, k * (kBlock / kItem), fresh);
    advance.block(fresh, base, key + 8 * k * kDigestKeyStep);
  }
  return advance.sum;
}

// One chunk; returns what the digest of the stream changes by, in which the chunk starts at word `first_word`.
template <std::size_t kItem>
std::uint64_t advance_chunk(const unsigned char* fresh, unsigned char* base, std::size_t count, std::uint64_t first_word, Sink& sink) {
  const std::size_t num_blocks = count * kItem / kBlock, done = num_blocks * kBlock, rest = count * kItem - done;
  std::uint64_t sum = advance_blocks<kItem>(fresh, base, num_blocks, (first_word + 1) * kDigestKeyStep, sink);
  if (rest && std::memcmp(fresh + done, base + done, rest) != 0) {
    for (std::size_t i = done / kItem; i < count; ++i)
      if (std::memcmp(fresh + i * kItem, base + i * kItem, kItem) != 0) sink.take<kItem>(1, i, fresh + i * kItem);
    sum -= digest_sum(base + done, rest, first_word + done / 8);
    sum += digest_copy(base + done, fresh + done, rest, first_word + done / 8);
  }
  return sum;
}

template <std::size_t kItem>
std::size_t advance(const unsigned char* fresh, unsigned char* base, std::size_t num_elements, unsigned char* out, std::size_t capacity,
                    unsigned char* scratch, std::uint64_t& sum) {
  const std::size_t table_nbytes = delta_num_chunks(num_elements) * sizeof(DeltaChunk);
  unsigned char* table = out + kDeltaHead;
  unsigned char* const gaps = table + table_nbytes;
  unsigned char* const chunk_values = scratch + kDeltaChunk + 64;
  unsigned char* const values = scratch + delta_scratch_nbytes(kItem);
  std::uint64_t gap_nbytes = 0, value_nbytes = 0;
  for (std::size_t start = 0; start < num_elements; start += kDeltaChunk, table += sizeof(DeltaChunk)) {
    Sink sink{scratch, chunk_values, 0};
    const std::size_t at = start * kItem, count = std::min(kDeltaChunk, num_elements - start);
    sum += advance_chunk<kItem>(fresh + at, base + at, count, at / 8, sink);
    const auto new_gaps = static_cast<std::size_t>(sink.gap - scratch), new_values = static_cast<std::size_t>(sink.value - chunk_values);
    if (gap_nbytes + new_gaps + value_nbytes + new_values > capacity) {
      sum = digest_copy(base, fresh, num_elements * kItem, 0);
      return 0;
    }
    const DeltaChunk line{static_cast<std::uint32_t>(new_values / kItem), static_cast<std::uint32_t>(new_gaps)};
    std::memcpy(table, &line, sizeof(line));
    if (new_values) {
      std::memcpy(gaps + gap_nbytes, scratch, new_gaps);
      std::memcpy(values + value_nbytes, chunk_values, new_values);
    }
    gap_nbytes += new_gaps;
    value_nbytes += new_values;
  }
  const std::uint64_t head[2] = {gap_nbytes, value_nbytes / kItem};
  std::memcpy(out, head, sizeof(head));
  const std::size_t filled = (gap_nbytes + 7) / 8 * 8;
  std::memset(gaps + gap_nbytes, 0, filled - gap_nbytes);
  if (value_nbytes) std::memcpy(gaps + filled, values, value_nbytes);
  return kDeltaHead + table_nbytes + filled + value_nbytes;
}

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

// Positions are decoded a batch ahead, so that the lines they lie in are on their way when they are written. Moves `gaps` and
// `values` on to the next chunk.
template <std::size_t kItem>
void apply_chunk(unsigned char* target, std::uint32_t gap_nbytes, const unsigned char*& gaps, const unsigned char*& values) {
  constexpr std::size_t kBatch = 64;
  std::uint32_t positions[kBatch];
  const unsigned char* const end = gaps + gap_nbytes;
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

template <std::size_t kItem>
void apply(unsigned char* target, const DeltaChunk* table, std::size_t num_chunks, const unsigned char* gaps, const unsigned char* values) {
  for (std::size_t c = 0; c < num_chunks; ++c, target += kDeltaChunk * kItem) apply_chunk<kItem>(target, table[c].gap_nbytes, gaps, values);
}

// Each chunk is summed while it is in the cache.
template <std::size_t kItem>
std::uint64_t apply_digest(unsigned char* target, std::size_t num_elements, const DeltaChunk* table, const unsigned char* gaps,
                           const unsigned char* values) {
  std::uint64_t sum = 0;
  for (std::size_t start = 0; start < num_elements; start += kDeltaChunk, ++table) {
    unsigned char* const chunk = target + start * kItem;
    apply_chunk<kItem>(chunk, table->gap_nbytes, gaps, values);
    sum += digest_sum(chunk, std::min(kDeltaChunk, num_elements - start) * kItem, start * kItem / 8);
  }
  return sum;
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

std::size_t delta_advance(const void* fresh, void* base, std::size_t num_elements, std::size_t item_nbytes, unsigned char* out,
                          std::size_t capacity, unsigned char* scratch, std::uint64_t& sum) {
  const auto* a = static_cast<const unsigned char*>(fresh);
  auto* b = static_cast<unsigned char*>(base);
  switch (item_nbytes) {
    case 1: return advance<1>(a, b, num_elements, out, capacity, scratch, sum);
    case 2: return advance<2>(a, b, num_elements, out, capacity, scratch, sum);
    case 4: return advance<4>(a, b, num_elements, out, capacity, scratch, sum);
    default: return advance<8>(a, b, num_elements, out, capacity, scratch, sum);
  }
}

std::uint64_t delta_apply_digest(void* target, std::size_t num_elements, std::size_t item_nbytes, const DeltaChunk* table,
                                 const unsigned char* gaps, const unsigned char* values) {
  auto* t = static_cast<unsigned char*>(target);
  switch (item_nbytes) {
    case 1: return apply_digest<1>(t, num_elements, table, gaps, values);
    case 2: return apply_digest<2>(t, num_elements, table, gaps, values);
    case 4: return apply_digest<4>(t, num_elements, table, gaps, values);
    default: return apply_digest<8>(t, num_elements, table, gaps, values);
  }
}

}  // namespace rl
