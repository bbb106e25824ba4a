// Tensor frames (FRAMES.md): the header's layout, a writer and a bounds-checked reader. Plain C++, no Python.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace rl::frames {

constexpr unsigned char kMagic[8] = {0x89, 'R', 'L', 'F', '\r', '\n', 0x1A, '\n'};
constexpr std::uint16_t kVersion = 1;
constexpr std::uint32_t kHasPayloadDigest = 1;
constexpr std::size_t kAlignment = 64;
constexpr unsigned kMaxDims = 32;
constexpr unsigned kMaxLevels = 2;

enum Kind : std::uint8_t { kDense = 0, kRagged = 1, kBytes = 2 };

struct Prefix {
  unsigned char magic[8];
  std::uint16_t version;
  std::uint16_t minor;
  std::uint32_t flags;
  std::uint64_t nbytes;
  std::uint32_t header_nbytes;
  std::uint32_t num_entries;
  std::uint32_t num_dims;
  std::uint32_t names_nbytes;
  std::uint64_t tag;
  std::uint64_t payload_digest;
  std::uint64_t header_digest;
};
static_assert(sizeof(Prefix) == 64);

struct Span {
  std::uint64_t offset;
  std::uint64_t nbytes;
};

struct Entry {
  Span values;
  std::uint32_t name_offset;
  std::uint16_t name_nbytes;
  std::uint8_t kind;
  std::uint8_t dtype;
  std::uint8_t ndim;
  std::uint8_t num_levels;
  std::uint8_t level_dtype[kMaxLevels];  // 1 = int32, 2 = int64
  std::uint32_t dims_start;
  Span levels[kMaxLevels];
};
static_assert(sizeof(Entry) == 64);

// dtype code -> DLPack's (code, bits, lanes) and the bytes of one element. Code 0 is none.
struct DType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  std::uint8_t nbytes;
};
constexpr DType kDTypes[] = {
    {0, 0, 0, 0},    {6, 8, 1, 1},    {1, 8, 1, 1},    {0, 8, 1, 1},   {1, 16, 1, 2},  {0, 16, 1, 2},
    {1, 32, 1, 4},   {0, 32, 1, 4},   {1, 64, 1, 8},   {0, 64, 1, 8},  {2, 16, 1, 2},  {4, 16, 1, 2},
    {2, 32, 1, 4},   {2, 64, 1, 8},   {5, 32, 1, 4},   {5, 64, 1, 8},  {5, 128, 1, 16}, {10, 8, 1, 1},
    {12, 8, 1, 1},   {11, 8, 1, 1},   {13, 8, 1, 1},   {14, 8, 1, 1},  {17, 4, 2, 1},
};
constexpr unsigned kNumDTypes = sizeof(kDTypes) / sizeof(kDTypes[0]);

constexpr std::size_t align_up(std::size_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; }

// Whether `count` offsets (int32 for level dtype 1, int64 for 2) start at 0, never fall and end at `last`.
bool offsets_rise(const void* data, std::uint8_t level_dtype, std::size_t count, std::uint64_t last);

// A checked frame: everything it refers to lies inside the bytes it was parsed from.
class Reader {
 public:
  // Parses `size` bytes at `data`, which must stay alive. The header is copied before it is checked: a writer that changes it
  // later changes nothing here. Returns an empty string, or a sentence that says what is wrong. `check_digest` false skips
  // the header's digest, so that a fuzzer reaches what lies behind it.
  std::string parse(const unsigned char* data, std::size_t size, bool check_digest = true);

  // Compares the payload with its stored digest. Reads every byte.
  std::string verify_payload() const;

  const Prefix& prefix() const { return prefix_; }
  std::size_t size() const { return prefix_.num_entries; }
  const Entry& entry(std::size_t i) const { return entries_[i]; }
  const std::uint64_t* dims(std::size_t i) const { return dims_ + entries_[i].dims_start; }
  std::string_view name(std::size_t i) const { return {names_ + entries_[i].name_offset, entries_[i].name_nbytes}; }
  // Index of the entry with this name, or -1.
  std::ptrdiff_t find(std::string_view name) const;

 private:
  std::string check_prefix(std::size_t size);
  std::string check_entry(std::size_t i, std::uint64_t& payload_end) const;
  std::string check_offsets(std::size_t i) const;
  std::string index_names();
  std::string at(std::size_t i, const char* what) const;

  Prefix prefix_{};
  const unsigned char* data_ = nullptr;
  std::unique_ptr<std::uint64_t[]> header_;  // a private copy; the three below point into it
  const Entry* entries_ = nullptr;
  const std::uint64_t* dims_ = nullptr;
  const char* names_ = nullptr;
  std::vector<std::uint32_t> table_;  // open addressing over names: entry + 1, or 0
};

// Builds a header. Add entries in order, then finish.
class Writer {
 public:
  struct Region {
    const void* data;
    std::uint64_t offset;  // from the start of the payload
    std::uint64_t nbytes;
  };

  void reserve(std::size_t num_entries);
  Entry& add(std::string_view name, Kind kind, std::uint8_t dtype, const std::int64_t* shape, unsigned ndim);
  Span place(const void* data, std::uint64_t nbytes);  // offset is relative to the payload until finish()
  // Lays out the header with no payload digest. Returns false if names, dims or entries exceed 4 GiB.
  bool finish(std::uint64_t tag);
  void set_payload_digest(std::uint64_t digest);

  const std::vector<unsigned char>& header() const { return header_; }
  const std::vector<Region>& regions() const { return regions_; }
  std::uint64_t nbytes() const { return header_.size() + cursor_; }

 private:
  void sign();

  std::vector<Entry> entries_;
  std::vector<std::uint64_t> dims_;
  std::string names_;
  std::vector<Region> regions_;
  std::vector<unsigned char> header_;
  std::uint64_t cursor_ = 0;
};

}  // namespace rl::frames
