// libFuzzer target for deltas: the input is a table, gaps and a count of values. What delta_check lets through must stay inside.
#include <cstdint>
#include <cstring>
#include <vector>

#include "rl_csrc/delta.h"

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
  const std::vector<unsigned char> gaps(input, input + size);
  std::size_t named = 0;
  for (unsigned char gap : gaps) named += gap != 255;
  const std::vector<unsigned char> values(named * item, 0x5A);
  std::vector<unsigned char> target(num_elements * item);
  if (rl::delta_check(table.data(), num_chunks, gaps.data(), gaps.size(), named, num_elements).empty())
    rl::delta_apply(target.data(), item, table.data(), num_chunks, gaps.data(), values.data());
  return 0;
}
