// libFuzzer target for deltas: the input is a table, gaps and a count of values. What delta_check lets through must stay inside, give
// the digest of what it wrote, and come out again when it is encoded.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "rl_csrc/delta.h"
#include "rl_csrc/digest.h"

namespace {

using Bytes = std::vector<unsigned char>;

void must(bool is_true) {
  if (!is_true) std::abort();
}

std::uint64_t digest(const Bytes& bytes) { return rl::digest_sum(bytes.data(), bytes.size(), 0); }

// What delta_advance laid out, applied to zeros.
Bytes replay(const Bytes& laid, std::size_t num_elements, std::size_t item) {
  std::uint64_t gap_nbytes = 0, num_changed = 0;
  std::memcpy(&gap_nbytes, laid.data(), 8);
  std::memcpy(&num_changed, laid.data() + 8, 8);
  const std::size_t num_chunks = rl::delta_num_chunks(num_elements);
  std::vector<rl::DeltaChunk> table(num_chunks);
  const unsigned char* gaps = laid.data() + rl::kDeltaHead + num_chunks * sizeof(rl::DeltaChunk);
  if (num_chunks) std::memcpy(table.data(), laid.data() + rl::kDeltaHead, num_chunks * sizeof(rl::DeltaChunk));
  must(rl::delta_check(table.data(), num_chunks, gaps, gap_nbytes, num_changed, num_elements).empty());
  Bytes target(num_elements * item);
  rl::delta_apply(target.data(), item, table.data(), num_chunks, gaps, gaps + (gap_nbytes + 7) / 8 * 8);
  return target;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* input, std::size_t size) {
  if (size < 8) return 0;
  std::uint32_t head[2];
  std::memcpy(head, input, 8);
  const std::size_t num_elements = head[0] % (2 * rl::kDeltaChunk + 5), item = std::size_t{1} << (head[1] % 4);
  const std::size_t num_chunks = rl::delta_num_chunks(num_elements);
  input += 8, size -= 8;
  if (size < num_chunks * sizeof(rl::DeltaChunk)) return 0;
  std::vector<rl::DeltaChunk> table(num_chunks);
  if (num_chunks) std::memcpy(table.data(), input, num_chunks * sizeof(rl::DeltaChunk));
  input += num_chunks * sizeof(rl::DeltaChunk), size -= num_chunks * sizeof(rl::DeltaChunk);
  const Bytes gaps(input, input + size);
  std::size_t named = 0;
  for (unsigned char gap : gaps) named += gap != 255;
  const Bytes values(named * item, 0x5A);
  if (!rl::delta_check(table.data(), num_chunks, gaps.data(), gaps.size(), named, num_elements).empty()) return 0;

  Bytes applied(num_elements * item), base(applied), digested(applied);
  rl::delta_apply(applied.data(), item, table.data(), num_chunks, gaps.data(), values.data());
  const std::uint64_t sum = rl::delta_apply_digest(digested.data(), num_elements, item, table.data(), gaps.data(), values.data());
  must(digested == applied && sum == digest(applied));

  std::uint64_t advanced = digest(base);
  const std::size_t capacity = gaps.size() + values.size();
  Bytes out(rl::delta_room(num_elements, capacity)), scratch(rl::delta_advance_scratch_nbytes(item, capacity));
  const std::size_t laid = rl::delta_advance(applied.data(), base.data(), num_elements, item, out.data(), capacity, scratch.data(), advanced);
  must(base == applied && advanced == sum);
  if (laid) must(replay(out, num_elements, item) == applied);
  return 0;
}
