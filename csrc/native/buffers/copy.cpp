#include "rl_csrc/copy.h"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "isa.h"
#include "rl_csrc/digest.h"
#include "simd.h"

namespace rl {
namespace {

constexpr std::size_t kStreamingBytes = std::size_t{1} << 20;
constexpr std::size_t kBytesPerThread = std::size_t{2} << 20;  // below this a thread costs more than it copies

#if defined(__x86_64__)
// Whole 128-byte steps to a 64-byte aligned destination, past the cache.
__attribute__((target("avx2"))) void stream_avx2(unsigned char* dst, const unsigned char* src, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += 128) {
    for (std::size_t j = 0; j < 128; j += 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + j), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + j)));
  }
  _mm_sfence();
}

__attribute__((target("avx512f"))) void stream_avx512(unsigned char* dst, const unsigned char* src, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += 128) {
    const __m512i a = _mm512_loadu_si512(src + i), b = _mm512_loadu_si512(src + i + 64);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 64), b);
  }
  _mm_sfence();
}
#endif

void copy_one(unsigned char* dst, const unsigned char* src, std::size_t nbytes, bool is_streamed) {
#if defined(__x86_64__)
  if (is_streamed && isa() != Isa::baseline) {
    const std::size_t head = std::min(nbytes, (64 - reinterpret_cast<std::uintptr_t>(dst) % 64) % 64);
    const std::size_t body = (nbytes - head) / 128 * 128;
    std::memcpy(dst, src, head);
    (isa() == Isa::avx512 ? stream_avx512 : stream_avx2)(dst + head, src + head, body);
    std::memcpy(dst + head + body, src + head + body, nbytes - head - body);
    return;
  }
#endif
  if (nbytes) std::memcpy(dst, src, nbytes);
}

// Calls work(item, from, to) for the bytes [from, to) of each item that fall to this thread. Cuts lie on 8-byte words.
template <typename Item, typename Size, typename Work>
void over_threads(std::span<const Item> items, int num_threads, Size size, Work work) {
  std::size_t total = 0;
  for (const Item& item : items) total += size(item);
  const std::size_t most = std::max<std::size_t>(1, total / kBytesPerThread);
  const int threads = static_cast<int>(std::min<std::size_t>(most, static_cast<std::size_t>(std::max(1, num_threads))));
  auto part = [&](int index) {
    const std::size_t low = total / threads * index, high = index + 1 == threads ? total : total / threads * (index + 1);
    std::size_t start = 0;
    for (const Item& item : items) {
      const std::size_t n = size(item), stop = start + n;
      if (stop > low && start < high) {
        const std::size_t from = low > start ? (low - start) / 8 * 8 : 0;
        const std::size_t to = high < stop ? (high - start) / 8 * 8 : n;
        if (to > from) work(index, item, from, to);
      }
      start = stop;
    }
  };
  std::vector<std::thread> helpers;
  int started = 1;
  try {
    for (; started < threads; ++started) helpers.emplace_back(part, started);
  } catch (const std::system_error&) {
    // No thread to be had: this one does the parts that nobody took.
  }
  part(0);
  for (int index = started; index < threads; ++index) part(index);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace

void copy_many(std::span<const CopyItem> items, int num_threads) {
  over_threads(
      items, num_threads, [](const CopyItem& item) { return item.nbytes; },
      [](int, const CopyItem& item, std::size_t from, std::size_t to) {
        copy_one(static_cast<unsigned char*>(item.dst) + from, static_cast<const unsigned char*>(item.src) + from, to - from, to - from >= kStreamingBytes);
      });
}

void copy_part(std::span<const CopyItem> items, std::span<const std::size_t> starts, std::size_t begin, std::size_t end) {
  auto i = static_cast<std::size_t>(std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin()) - 1;
  for (; i < items.size() && starts[i] < end; ++i) {
    const std::size_t from = std::max(begin, starts[i]) - starts[i], to = std::min(end, starts[i + 1]) - starts[i];
    copy_one(static_cast<unsigned char*>(items[i].dst) + from, static_cast<const unsigned char*>(items[i].src) + from, to - from,
             items[i].nbytes >= kStreamingBytes);
  }
}

std::uint64_t copy_many_digest(std::span<const DigestItem> items, int num_threads) {
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(std::max(1, num_threads)) * 8);  // a cache line each
  over_threads(
      items, num_threads, [](const DigestItem& item) { return item.copy.nbytes; },
      [&](int index, const DigestItem& item, std::size_t from, std::size_t to) {
        sums[static_cast<std::size_t>(index) * 8] +=
            digest_copy(static_cast<unsigned char*>(item.copy.dst) + from,
                        static_cast<const unsigned char*>(item.copy.src) + from, to - from, item.first_word + from / 8);
      });
  std::uint64_t sum = 0;
  for (std::uint64_t part : sums) sum += part;
  return sum;
}

}  // namespace rl
