// Copies of many byte ranges: non-temporal where that pays, over several threads when asked.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace rl {

struct CopyItem {
  void* dst;
  const void* src;
  std::size_t nbytes;
};

// Copies every item. Destinations must not overlap one another or any source. `num_threads` below 2 stays on this thread;
// threads are made and joined within the call, so a forked child works.
void copy_many(std::span<const CopyItem> items, int num_threads);

// Copies bytes [begin, end) of the items as if they lay one after the other, each part as copy_many would copy the whole item.
// Item i begins at starts[i], and the last of starts is the sum.
void copy_part(std::span<const CopyItem> items, std::span<const std::size_t> starts, std::size_t begin, std::size_t end);

// Where the item lies in its stream, so that its bytes can be digested on the way.
struct DigestItem {
  CopyItem copy;
  std::uint64_t first_word;
};

// Copies every item and returns the sum of the digest terms of the bytes copied.
std::uint64_t copy_many_digest(std::span<const DigestItem> items, int num_threads);

}  // namespace rl
