#include "rl_csrc/ring.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

namespace rl {
namespace {

constexpr std::size_t kPage = 4096;

std::size_t pages(std::size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }
std::uint32_t self() { return static_cast<std::uint32_t>(::getpid()); }
bool is_past(Deadline deadline) { return std::chrono::steady_clock::now() >= deadline; }

}  // namespace

std::size_t RingGeometry::slot_headers() const { return pages(sizeof(RingHeader)); }
std::size_t RingGeometry::slots() const { return slot_headers() + pages(std::size_t{num_slots} * sizeof(SlotHeader)); }
std::size_t RingGeometry::total() const { return slots() + std::size_t{num_slots} * slot_nbytes; }

RingWriter::RingWriter(const char* name, RingGeometry geometry, std::uint32_t num_readers, bool prefault)
    : geometry_(geometry), memory_(SharedMemory::create(name, geometry.total(), prefault)), creator_(self()) {
  RingHeader* h = new (memory_->data()) RingHeader{};
  h->num_slots = geometry.num_slots;
  h->num_readers = kMaxReaders;
  h->slot_nbytes = geometry.slot_nbytes;
  for (std::uint32_t r = 0; r < num_readers; ++r) h->readers[r].state = ReaderState::expected;
  set_self(h->writer);
  std::memcpy(h->magic, kRingMagic, sizeof(kRingMagic));
}

RingWriter::~RingWriter() {
  if (creator_ == self()) close();
}

Wait RingWriter::wait_tails(std::uint64_t needed, Deadline deadline, int& culprit) {
  RingHeader& h = header();
  const std::uint32_t seen = h.released.count.load();
  culprit = -1;
  std::uint64_t slowest = needed;
  for (int r = 0; r < static_cast<int>(kMaxReaders); ++r) {
    // One that is just joining counts as well: it may be one that slots were kept for.
    const ReaderState state = h.readers[r].state.load();
    if (state == ReaderState::free || state == ReaderState::evicted) continue;
    const std::uint64_t tail = h.readers[r].tail.load();
    if (tail < slowest) slowest = tail, culprit = r;
  }
  if (culprit < 0) return Wait::ready;
  if (is_past(deadline)) return Wait::late;
  wait_a_while(h.released, seen, deadline);
  if (h.released.count.load() != seen) return Wait::again;
  // Nothing moved for a whole nap: is whoever holds things up still there?
  for (int r = 0; r < static_cast<int>(kMaxReaders); ++r) {
    ReaderLine& line = h.readers[r];
    if (line.state.load() == ReaderState::attached && line.tail.load() < needed && !is_alive(line.process)) {
      culprit = r;
      return Wait::died;
    }
  }
  return Wait::again;
}

Wait RingWriter::wait_slot(Deadline deadline, int& culprit) {
  if (head_ < geometry_.num_slots) return Wait::ready;
  return wait_tails(head_ - geometry_.num_slots + 1, deadline, culprit);
}

Wait RingWriter::wait_drained(Deadline deadline, int& culprit) { return wait_tails(head_, deadline, culprit); }

unsigned char* RingWriter::slot() const {
  return memory_->data() + geometry_.slots() + head_ % geometry_.num_slots * geometry_.slot_nbytes;
}

std::uint64_t RingWriter::publish(std::uint64_t nbytes, std::uint64_t tag) {
  auto* headers = reinterpret_cast<SlotHeader*>(memory_->data() + geometry_.slot_headers());
  headers[head_ % geometry_.num_slots] = {head_, nbytes, tag, {}};
  header().head.store(++head_);
  header().published.ring();
  return head_ - 1;
}

void RingWriter::evict(int reader) {
  ReaderLine& line = header().readers[reader];
  // A dead reader's line can be used again; a living one might still write to it, so its line stays shut.
  const bool gone = line.state.load() != ReaderState::attached || !is_alive(line.process);
  line.state.store(gone ? ReaderState::free : ReaderState::evicted);
  header().published.ring();
}

void RingWriter::close() {
  header().writer_state.store(WriterState::closed);
  header().published.ring();
}

RingReader::RingReader(int fd, bool prefault) : memory_(SharedMemory::attach(fd, prefault)), creator_(self()) {
  if (memory_->nbytes() < sizeof(RingHeader)) throw std::invalid_argument("the memory is too small to be a ring");
  RingHeader& h = header();
  geometry_ = {h.num_slots, h.slot_nbytes};
  const bool sane = std::memcmp(h.magic, kRingMagic, sizeof(kRingMagic)) == 0 && geometry_.num_slots > 0 &&
                    geometry_.slot_nbytes % kPage == 0 && geometry_.slot_nbytes <= memory_->nbytes() &&
                    geometry_.num_slots <= memory_->nbytes() / std::max<std::uint64_t>(geometry_.slot_nbytes, 1) &&
                    geometry_.total() <= memory_->nbytes();
  if (!sane) throw std::invalid_argument("the memory does not hold a ring of this version");
  for (ReaderState wanted : {ReaderState::expected, ReaderState::free}) {
    for (int r = 0; r < static_cast<int>(kMaxReaders) && index_ < 0; ++r) {
      ReaderState state = wanted;
      if (!h.readers[r].state.compare_exchange_strong(state, ReaderState::joining)) continue;
      index_ = r;
      set_self(line().process);
      // One that is expected gets everything from the start; one that joins late gets what comes after it.
      if (wanted == ReaderState::free) line().tail.store(h.head.load());
      line().state.store(ReaderState::attached);
      if (wanted == ReaderState::free) line().tail.store(h.head.load());
      cursor_ = tail_ = line().tail.load();
    }
  }
  if (index_ < 0) throw std::runtime_error("every reader line of the ring is taken");
  h.released.ring();
}

RingReader::~RingReader() {
  if (creator_ == self()) detach();
}

Wait RingReader::next(Deadline deadline, Slot& slot) {
  RingHeader& h = header();
  const std::uint32_t seen = h.published.count.load();
  if (index_ < 0 || is_evicted()) return Wait::closed;
  if (cursor_ < h.head.load()) {
    const std::uint64_t at = cursor_ % geometry_.num_slots;
    const auto& s = reinterpret_cast<const SlotHeader*>(memory_->data() + geometry_.slot_headers())[at];
    // A length is never believed beyond the slot, whoever wrote it.
    slot = {memory_->data() + geometry_.slots() + at * geometry_.slot_nbytes, cursor_, std::min(s.nbytes, geometry_.slot_nbytes), s.tag};
    ++cursor_;
    return Wait::ready;
  }
  if (h.writer_state.load() == WriterState::closed) return cursor_ < h.head.load() ? Wait::again : Wait::closed;
  if (is_past(deadline)) return Wait::late;
  wait_a_while(h.published, seen, deadline);
  if (h.published.count.load() != seen || is_alive(h.writer)) return Wait::again;
  return cursor_ < h.head.load() ? Wait::again : Wait::died;
}

bool RingReader::release() {
  if (index_ < 0 || tail_ == cursor_) return false;
  line().tail.store(++tail_);
  header().released.ring();
  return true;
}

void RingReader::detach() {
  if (index_ < 0) return;
  ReaderState state = ReaderState::attached;
  line().state.compare_exchange_strong(state, ReaderState::free);
  index_ = -1;
  header().released.ring();
}

}  // namespace rl
