// libFuzzer target for the frame parser. The header digest is not checked, so that the fuzzer reaches what lies behind it. Every
// byte that a parsed frame refers to is read under ASan, and what was parsed is put together again and parsed once more.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "rl_csrc/frames.h"

namespace {

using rl::frames::Entry;
using rl::frames::Reader;
using rl::frames::Span;

volatile std::uint64_t sink;

void touch(const unsigned char* data, const Span& span) {
  std::uint64_t sum = 0;
  for (std::uint64_t i = 0; i < span.nbytes; ++i) sum += data[span.offset + i];
  sink = sum;
}

void require(bool ok) {
  if (!ok) std::abort();
}

void use(const Reader& reader, const unsigned char* data) {
  for (std::size_t i = 0; i < reader.size(); ++i) {
    const Entry& e = reader.entry(i);
    require(reader.find(reader.name(i)) == static_cast<std::ptrdiff_t>(i));
    touch(data, e.values);
    std::uint64_t nbytes = rl::frames::kDTypes[e.dtype].nbytes;
    for (unsigned d = 0; d < e.ndim; ++d) nbytes *= reader.dims(i)[d];
    if (e.kind != rl::frames::kBytes) require(nbytes == e.values.nbytes);
    for (unsigned level = 0; level < e.num_levels; ++level) touch(data, e.levels[level]);
  }
  reader.verify_payload();
}

void write_again(const Reader& reader, const unsigned char* data) {
  rl::frames::Writer writer;
  for (std::size_t i = 0; i < reader.size(); ++i) {
    const Entry& e = reader.entry(i);
    Entry& copy = writer.add(reader.name(i), static_cast<rl::frames::Kind>(e.kind), e.dtype,
                             reinterpret_cast<const std::int64_t*>(reader.dims(i)), e.ndim);
    copy.num_levels = e.num_levels;
    copy.values = writer.place(data + e.values.offset, e.values.nbytes);
    for (unsigned level = 0; level < e.num_levels; ++level) {
      copy.level_dtype[level] = e.level_dtype[level];
      copy.levels[level] = writer.place(data + e.levels[level].offset, e.levels[level].nbytes);
    }
  }
  require(writer.finish(reader.prefix().tag));
  std::unique_ptr<std::uint64_t[]> block(new std::uint64_t[writer.nbytes() / 8]());
  auto* out = reinterpret_cast<unsigned char*>(block.get());
  std::memcpy(out, writer.header().data(), writer.header().size());
  for (const auto& region : writer.regions())
    if (region.nbytes) std::memcpy(out + writer.header().size() + region.offset, region.data, region.nbytes);
  Reader again;
  require(again.parse(out, writer.nbytes()).empty());
  require(again.size() == reader.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* input, std::size_t size) {
  // A block of exactly this size, aligned as a frame must be, so that ASan sees one byte too far.
  void* block = nullptr;
  if (posix_memalign(&block, 64, size ? size : 1) != 0) return 0;
  if (size) std::memcpy(block, input, size);
  auto* data = static_cast<unsigned char*>(block);
  Reader reader;
  if (reader.parse(data, size, false).empty()) {
    use(reader, data);
    write_again(reader, data);
  }
  std::free(block);
  return 0;
}
