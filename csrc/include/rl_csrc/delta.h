// Bit-exact difference of two arrays of the same length: which elements changed (gap-coded) and what they are now.
//
// Elements are opaque words of 1, 2, 4 or 8 bytes. They are cut into chunks of 65536; a chunk's changed positions are coded as one
// byte per step: `b < 255` skips b elements and names the next one, 255 skips 255 elements and names none. FRAMES.md specifies it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace rl {

constexpr std::size_t kDeltaChunk = 65536;

struct DeltaChunk {
  std::uint32_t num_changed;
  std::uint32_t gap_nbytes;
};
static_assert(sizeof(DeltaChunk) == 8);

struct DeltaSizes {
  std::uint64_t gap_nbytes;
  std::uint64_t num_changed;
};

inline std::size_t delta_num_chunks(std::size_t num_elements) { return (num_elements + kDeltaChunk - 1) / kDeltaChunk; }

// Bytes of scratch space that delta_encode needs.
inline std::size_t delta_scratch_nbytes(std::size_t item_nbytes) { return kDeltaChunk * (item_nbytes + 1) + 128; }

// Fills one `table` line per chunk, `gaps` and `values`. Stops and returns false as soon as gaps and values together would be
// larger than `capacity` bytes; each of the two has that much room.
bool delta_encode(const void* fresh, const void* base, std::size_t num_elements, std::size_t item_nbytes, DeltaChunk* table,
                  unsigned char* gaps, unsigned char* values, std::size_t capacity, unsigned char* scratch, DeltaSizes& sizes);

// Whether the parts belong together and stay inside `num_elements`: an empty string, or a sentence.
std::string delta_check(const DeltaChunk* table, std::size_t num_chunks, const unsigned char* gaps, std::size_t gap_nbytes,
                        std::size_t num_values, std::size_t num_elements);

// Overwrites the changed elements. Call delta_check first, on memory that nobody else can write meanwhile.
void delta_apply(void* target, std::size_t item_nbytes, const DeltaChunk* table, std::size_t num_chunks,
                 const unsigned char* gaps, const unsigned char* values);

// The same three arrays behind one another, as one run of bytes: gap_nbytes u64, num_changed u64, the table, the gaps (filled with
// zeros to a multiple of 8), the values.
constexpr std::size_t kDeltaHead = 16;

// Most bytes of `out` that delta_advance fills: seven zeros may follow the gaps.
inline std::size_t delta_room(std::size_t num_elements, std::size_t capacity) {
  return kDeltaHead + delta_num_chunks(num_elements) * sizeof(DeltaChunk) + capacity + 7;
}

inline std::size_t delta_advance_scratch_nbytes(std::size_t item_nbytes, std::size_t capacity) {
  return delta_scratch_nbytes(item_nbytes) + capacity;
}

// One pass over both: lays the difference out in `out`, makes `base` equal to `fresh`, and changes `sum`, the unfinished digest of
// base, into that of fresh. Returns the bytes of the difference; 0 if gaps and values would be larger than `capacity`: all the rest
// is done then as well.
std::size_t delta_advance(const void* fresh, void* base, std::size_t num_elements, std::size_t item_nbytes, unsigned char* out,
                          std::size_t capacity, unsigned char* scratch, std::uint64_t& sum);

// delta_apply, and the unfinished digest of the whole target after it, read back from where it was written.
std::uint64_t delta_apply_digest(void* target, std::size_t num_elements, std::size_t item_nbytes, const DeltaChunk* table,
                                 const unsigned char* gaps, const unsigned char* values);

}  // namespace rl
