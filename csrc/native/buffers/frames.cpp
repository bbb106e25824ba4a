#include "rl_csrc/frames.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "rl_csrc/digest.h"

namespace rl::frames {
namespace {

constexpr unsigned kMaxProbes = 1024;  // bounds what names made to collide can cost
constexpr std::size_t kDigestWord = offsetof(Prefix, header_digest) / 8;

// Digest of a header as if its own digest field were zero.
std::uint64_t header_digest(const std::uint64_t* header, std::size_t nbytes) {
  const std::uint64_t sum = digest_sum(header, nbytes, 0) - digest_word(header[kDigestWord], kDigestWord) +
                            digest_word(0, kDigestWord);
  return digest_finish(sum, nbytes);
}

// Only for finding names: cheap, one multiplication a word.
std::uint64_t hash_name(std::string_view name) {
  std::uint64_t hash = name.size();
  auto add = [&hash](std::uint64_t word) {
    hash = (hash ^ word) * kDigestMultiplier;
    hash ^= hash >> 32;
  };
  std::size_t i = 0;
  std::uint64_t word = 0;
  for (; i + 8 <= name.size(); i += 8) {
    std::memcpy(&word, name.data() + i, 8);
    add(word);
  }
  word = 0;
  std::memcpy(&word, name.data() + i, name.size() - i);
  add(word);
  return hash;
}

bool is_continuation(unsigned char c) { return (c & 0xC0) == 0x80; }

// Well-formed UTF-8: no overlong form, no surrogate, nothing beyond U+10FFFF.
bool is_utf8(std::string_view text) {
  const auto* s = reinterpret_cast<const unsigned char*>(text.data());
  const std::size_t n = text.size();
  std::size_t i = 0;
  while (i < n) {
    std::uint64_t word;
    if (i + 8 <= n && (std::memcpy(&word, s + i, 8), (word & 0x8080808080808080ull) == 0)) {
      i += 8;
      continue;
    }
    const unsigned char c = s[i];
    const std::size_t length = c < 0x80 ? 1 : c < 0xC2 ? 0 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : c < 0xF5 ? 4 : 0;
    if (length == 0 || i + length > n) return false;
    for (std::size_t j = 1; j < length; ++j)
      if (!is_continuation(s[i + j])) return false;
    if ((c == 0xE0 && s[i + 1] < 0xA0) || (c == 0xED && s[i + 1] > 0x9F) || (c == 0xF0 && s[i + 1] < 0x90) ||
        (c == 0xF4 && s[i + 1] > 0x8F))
      return false;
    i += length;
  }
  return true;
}

std::size_t level_nbytes(std::uint8_t dtype) { return dtype == 1 ? 4 : 8; }

// Regions are 64-byte aligned within a frame that is 8-byte aligned, so the casts are.
template <typename T>
bool rises(const void* data, std::size_t count, std::uint64_t last) {
  const T* offsets = static_cast<const T*>(data);
  bool ok = offsets[0] == 0 && static_cast<std::uint64_t>(offsets[count - 1]) == last;
  unsigned falls = 0;
  for (std::size_t i = 1; i < count; ++i) falls |= static_cast<unsigned>(offsets[i] < offsets[i - 1]);
  return ok && falls == 0;
}

std::string text(std::uint64_t n) { return std::to_string(n); }

}  // namespace

bool offsets_rise(const void* data, std::uint8_t level_dtype, std::size_t count, std::uint64_t last) {
  if (count == 0) return false;
  return level_dtype == 1 ? rises<std::int32_t>(data, count, last) : rises<std::int64_t>(data, count, last);
}

std::string Reader::parse(const unsigned char* data, std::size_t size, bool check_digest) {
  if (reinterpret_cast<std::uintptr_t>(data) % 8) return "the frame does not start at a multiple of 8 bytes: copy it into an aligned buffer";
  if (size < sizeof(Prefix))
    return "a frame has at least 64 bytes and this buffer " + text(size) + ": it was cut short";
  std::memcpy(&prefix_, data, sizeof(Prefix));
  if (std::string error = check_prefix(size); !error.empty()) return error;
  data_ = data;
  header_.reset(new std::uint64_t[prefix_.header_nbytes / 8]);
  std::memcpy(header_.get(), data, prefix_.header_nbytes);
  std::memcpy(header_.get(), &prefix_, sizeof(Prefix));  // the one that was checked
  if (check_digest && header_digest(header_.get(), prefix_.header_nbytes) != prefix_.header_digest)
    return "the header does not have the digest stored in it: it was damaged, overwritten or only half written";
  entries_ = reinterpret_cast<const Entry*>(header_.get() + sizeof(Prefix) / 8);
  dims_ = reinterpret_cast<const std::uint64_t*>(entries_ + prefix_.num_entries);
  names_ = reinterpret_cast<const char*>(dims_ + prefix_.num_dims);
  std::uint64_t payload_end = prefix_.header_nbytes;
  for (std::size_t i = 0; i < prefix_.num_entries; ++i)
    if (std::string error = check_entry(i, payload_end); !error.empty()) return error;
  return index_names();
}

std::string Reader::check_prefix(std::size_t size) {
  if (std::memcmp(prefix_.magic, kMagic, sizeof(kMagic)) != 0) return "the buffer does not start with the frame magic: it is not a frame";
  if (prefix_.version != kVersion)
    return "the frame has format version " + text(prefix_.version) + "; this reader knows version 1: upgrade rl-csrc on the reading side";
  const std::uint64_t used = sizeof(Prefix) + sizeof(Entry) * std::uint64_t{prefix_.num_entries} +
                             8 * std::uint64_t{prefix_.num_dims} + prefix_.names_nbytes;
  if (prefix_.header_nbytes != align_up(used))
    return "the header says it has " + text(prefix_.header_nbytes) + " bytes, its tables need " + text(align_up(used));
  if (prefix_.nbytes < prefix_.header_nbytes || prefix_.nbytes > size)
    return "the frame says it has " + text(prefix_.nbytes) + " bytes (" + text(prefix_.header_nbytes) +
           " of them header) and the buffer has " + text(size) + ": it was cut short";
  return {};
}

std::string Reader::at(std::size_t i, const char* what) const {
  return "entry " + text(i) + " of " + text(prefix_.num_entries) + ": " + what;
}

std::string Reader::check_entry(std::size_t i, std::uint64_t& payload_end) const {
  const Entry& e = entries_[i];
  if (e.name_offset > prefix_.names_nbytes || e.name_nbytes > prefix_.names_nbytes - e.name_offset) return at(i, "its name lies outside the names");
  if (!is_utf8(name(i))) return at(i, "its name is not UTF-8");
  if (e.kind > kBytes || e.dtype >= kNumDTypes || (e.kind == kBytes) != (e.dtype == 0)) return at(i, "kind and dtype do not go together, or this reader does not know them");
  if (e.ndim > kMaxDims || e.dims_start > prefix_.num_dims || e.ndim > prefix_.num_dims - e.dims_start) return at(i, "its shape lies outside the dims");
  if (e.num_levels > kMaxLevels || (e.kind == kRagged) != (e.num_levels > 0) || (e.kind == kRagged && e.ndim == 0) ||
      (e.kind == kBytes && e.ndim != 0))
    return at(i, "its kind does not go with its offsets and dimensions");
  auto inside = [&](const Span& span) {
    const bool ok = span.offset % kAlignment == 0 && span.offset >= payload_end && span.offset <= prefix_.nbytes &&
                    span.nbytes <= prefix_.nbytes - span.offset;
    if (ok) payload_end = span.offset + span.nbytes;
    return ok;
  };
  if (!inside(e.values)) return at(i, "its values do not lie in the payload, behind the entry before it, at a multiple of 64");
  if (e.kind != kBytes) {
    std::int64_t padded = kDTypes[e.dtype].nbytes, exact = kDTypes[e.dtype].nbytes;
    for (unsigned d = 0; d < e.ndim; ++d) {
      const std::uint64_t dim = dims_[e.dims_start + d];
      if (dim > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) ||
          __builtin_mul_overflow(padded, static_cast<std::int64_t>(std::max<std::uint64_t>(dim, 1)), &padded))
        return at(i, "its shape has more than 2^63 bytes");
      exact *= static_cast<std::int64_t>(dim);  // no larger than `padded`
    }
    if (static_cast<std::uint64_t>(exact) != e.values.nbytes) return at(i, "its shape and dtype do not have as many bytes as its values");
  }
  for (unsigned level = 0; level < e.num_levels; ++level) {
    if (e.level_dtype[level] != 1 && e.level_dtype[level] != 2) return at(i, "its offsets are neither int32 nor int64");
    if (!inside(e.levels[level])) return at(i, "its offsets do not lie in the payload, behind its values, at a multiple of 64");
  }
  return e.num_levels ? check_offsets(i) : std::string{};
}

std::string Reader::check_offsets(std::size_t i) const {
  const Entry& e = entries_[i];
  std::uint64_t below = dims_[e.dims_start];
  for (unsigned level = 0; level < e.num_levels; ++level) {
    const Span& span = e.levels[level];
    const std::size_t width = level_nbytes(e.level_dtype[level]), count = span.nbytes / width;
    if (count == 0 || span.nbytes % width) return at(i, "its offsets have no entry, or a part of one");
    if (!offsets_rise(data_ + span.offset, e.level_dtype[level], count, below))
      return at(i, "its offsets do not rise from 0 to the number of values");
    below = count - 1;
  }
  return {};
}

std::string Reader::index_names() {
  std::size_t slots = 16;
  while (slots < 2 * size()) slots *= 2;
  table_.assign(slots, 0);
  for (std::size_t i = 0; i < size(); ++i) {
    const std::string_view mine = name(i);
    std::size_t slot = hash_name(mine) & (slots - 1);
    for (unsigned probes = 0; table_[slot]; slot = (slot + 1) & (slots - 1)) {
      if (name(table_[slot] - 1) == mine) return at(i, "another entry has the same name");
      if (++probes > kMaxProbes) return at(i, "too many names collide: they were made to");
    }
    table_[slot] = static_cast<std::uint32_t>(i + 1);
  }
  return {};
}

std::ptrdiff_t Reader::find(std::string_view wanted) const {
  if (table_.empty()) return -1;
  for (std::size_t slot = hash_name(wanted) & (table_.size() - 1); table_[slot]; slot = (slot + 1) & (table_.size() - 1))
    if (name(table_[slot] - 1) == wanted) return static_cast<std::ptrdiff_t>(table_[slot] - 1);
  return -1;
}

std::string Reader::verify_payload() const {
  if (!(prefix_.flags & kHasPayloadDigest)) return "the frame carries no payload digest: encode it with checksum=True";
  const std::uint64_t nbytes = prefix_.nbytes - prefix_.header_nbytes;
  if (digest_finish(digest_sum(data_ + prefix_.header_nbytes, nbytes, 0), nbytes) != prefix_.payload_digest)
    return "the payload does not have the digest stored for it: it was damaged, overwritten or only half written";
  return {};
}

void Writer::reserve(std::size_t num_entries) {
  entries_.reserve(num_entries);
  regions_.reserve(num_entries);
  dims_.reserve(2 * num_entries);
  names_.reserve(32 * num_entries);
}

Entry& Writer::add(std::string_view name, Kind kind, std::uint8_t dtype, const std::int64_t* shape, unsigned ndim) {
  Entry& e = entries_.emplace_back();
  e.name_offset = static_cast<std::uint32_t>(names_.size());
  e.name_nbytes = static_cast<std::uint16_t>(name.size());
  e.kind = kind;
  e.dtype = dtype;
  e.ndim = static_cast<std::uint8_t>(ndim);
  e.dims_start = static_cast<std::uint32_t>(dims_.size());
  for (unsigned d = 0; d < ndim; ++d) dims_.push_back(static_cast<std::uint64_t>(shape[d]));
  names_.append(name);
  return e;
}

Span Writer::place(const void* data, std::uint64_t nbytes) {
  const Span span{cursor_, nbytes};
  regions_.push_back({data, cursor_, nbytes});
  cursor_ += align_up(nbytes);
  return span;
}

bool Writer::finish(std::uint64_t tag) {
  const std::uint64_t used = sizeof(Prefix) + sizeof(Entry) * entries_.size() + 8 * dims_.size() + names_.size();
  if (align_up(used) > std::numeric_limits<std::uint32_t>::max()) return false;
  header_.reserve(align_up(used));
  Prefix p{};
  std::memcpy(p.magic, kMagic, sizeof(kMagic));
  p.version = kVersion;
  p.nbytes = align_up(used) + cursor_;
  p.header_nbytes = static_cast<std::uint32_t>(align_up(used));
  p.num_entries = static_cast<std::uint32_t>(entries_.size());
  p.num_dims = static_cast<std::uint32_t>(dims_.size());
  p.names_nbytes = static_cast<std::uint32_t>(names_.size());
  p.tag = tag;
  for (Entry& e : entries_) {
    e.values.offset += p.header_nbytes;
    for (unsigned level = 0; level < e.num_levels; ++level) e.levels[level].offset += p.header_nbytes;
  }
  auto append = [this](const void* data, std::size_t nbytes) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    header_.insert(header_.end(), bytes, bytes + nbytes);
  };
  append(&p, sizeof(p));
  append(entries_.data(), sizeof(Entry) * entries_.size());
  append(dims_.data(), 8 * dims_.size());
  append(names_.data(), names_.size());
  header_.resize(p.header_nbytes);
  sign();
  return true;
}

void Writer::set_payload_digest(std::uint64_t digest) {
  std::uint32_t flags = kHasPayloadDigest;
  std::memcpy(header_.data() + offsetof(Prefix, flags), &flags, sizeof(flags));
  std::memcpy(header_.data() + offsetof(Prefix, payload_digest), &digest, sizeof(digest));
  sign();
}

void Writer::sign() {
  auto* words = reinterpret_cast<std::uint64_t*>(header_.data());
  words[kDigestWord] = header_digest(words, header_.size());
}

}  // namespace rl::frames
