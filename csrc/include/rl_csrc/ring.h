// A ring of slots in shared memory: one writer, several readers that each see every slot. Plain C++ for Linux, no Python.
//
// Counters have one writer each: `head` is the writer's, a reader's `tail` is that reader's. Slot `n` lives at n % num_slots and
// may be written again once every attached reader's tail is past it.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "rl_csrc/shared_memory.h"

namespace rl {

constexpr unsigned char kRingMagic[8] = {'R', 'L', 'R', 'I', 'N', 'G', '0', '1'};
constexpr std::uint32_t kMaxReaders = 64;

enum class ReaderState : std::uint32_t { free = 0, expected = 1, joining = 2, attached = 3, evicted = 4 };
enum class WriterState : std::uint32_t { open = 0, closed = 1 };

struct alignas(128) ReaderLine {
  std::atomic<ReaderState> state;
  std::atomic<std::uint64_t> tail;  // slots released
  Process process;
};

struct SlotHeader {
  std::uint64_t sequence;
  std::uint64_t nbytes;
  std::uint64_t tag;
  std::uint64_t reserved[5];
};
static_assert(sizeof(SlotHeader) == 64);

struct RingHeader {
  unsigned char magic[8];
  std::uint32_t num_slots;
  std::uint32_t num_readers;  // lines in `readers`
  std::uint64_t slot_nbytes;
  alignas(128) std::atomic<std::uint64_t> head;  // slots published
  std::atomic<WriterState> writer_state;
  Process writer;
  alignas(128) Doorbell published;
  alignas(128) Doorbell released;
  ReaderLine readers[kMaxReaders];
};

struct RingGeometry {
  std::uint32_t num_slots;
  std::uint64_t slot_nbytes;  // a multiple of 4096

  std::size_t slot_headers() const;
  std::size_t slots() const;
  std::size_t total() const;
};

enum class Wait { ready, again, late, closed, died };

class RingWriter {
 public:
  RingWriter(const char* name, RingGeometry geometry, std::uint32_t num_readers, bool prefault);
  ~RingWriter();

  // One look and at most one nap. `died` names the reader in `culprit`; `late` names the slowest.
  Wait wait_slot(Deadline deadline, int& culprit);
  unsigned char* slot() const;  // of the next sequence number; write here after wait_slot said ready
  std::uint64_t publish(std::uint64_t nbytes, std::uint64_t tag);
  Wait wait_drained(Deadline deadline, int& culprit);
  void evict(int reader);
  void close();

  const std::shared_ptr<SharedMemory>& memory() const { return memory_; }
  RingHeader& header() const { return *reinterpret_cast<RingHeader*>(memory_->data()); }
  std::uint64_t head() const { return head_; }
  const RingGeometry& geometry() const { return geometry_; }

 private:
  Wait wait_tails(std::uint64_t needed, Deadline deadline, int& culprit);

  RingGeometry geometry_;
  std::shared_ptr<SharedMemory> memory_;
  std::uint64_t head_ = 0;
  std::uint32_t creator_;  // pid: a forked child must not close its parent's ring
};

struct Slot {
  unsigned char* data;
  std::uint64_t sequence, nbytes, tag;
};

class RingReader {
 public:
  // Throws std::invalid_argument if the memory is not a ring, std::runtime_error if every reader line is taken.
  RingReader(int fd, bool prefault);
  ~RingReader();

  Wait next(Deadline deadline, Slot& slot);
  bool release();  // the oldest slot not yet released; false if none is held
  void detach();

  int index() const { return index_; }
  bool is_evicted() const { return line().state.load() == ReaderState::evicted; }
  std::uint64_t num_held() const { return cursor_ - tail_; }
  const std::shared_ptr<SharedMemory>& memory() const { return memory_; }
  RingHeader& header() const { return *reinterpret_cast<RingHeader*>(memory_->data()); }

 private:
  ReaderLine& line() const { return header().readers[index_]; }

  std::shared_ptr<SharedMemory> memory_;
  RingGeometry geometry_{};
  int index_ = -1;
  std::uint64_t cursor_ = 0, tail_ = 0;
  std::uint32_t creator_;
};

}  // namespace rl
