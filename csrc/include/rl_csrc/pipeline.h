// Buckets of a transfer, packed, verified and unpacked by a thread that never takes Python's lock; and streams written by one.
// Plain C++, no Python. A waker is a descriptor that a byte is sent to, so that a poll of another thread ends.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace rl {

struct Range {
  unsigned char* data;
  std::size_t nbytes;
};

// A run of bytes to move, to digest, or both.
struct Piece {
  unsigned char* to;              // null: in the job's slot, at `slot_offset`
  const unsigned char* from;      // the same
  std::size_t slot_offset, nbytes;
  bool is_copied, is_digested;
};

struct Job {
  std::int64_t bucket = -1;       // bucket that the job is of, which must have a slot before it can begin; -1: none
  int stream = -1;                // blocking socket that `reads` are filled from first; -1: none
  std::vector<Range> reads;
  std::vector<Piece> pieces;
  std::shared_ptr<void> owner;    // of the memory; it is returned with the result and never released by the thread
};

struct Result {
  static constexpr int kClosed = -1;
  int error = 0;                  // errno of a read, kClosed at the end of the stream
  std::vector<std::vector<std::uint64_t>> leaves;  // digests of the leaves of each piece; one for a piece without bytes
  std::shared_ptr<void> owner;
};

// What streams have not written of what they were given: the thread of a pipeline digests no further ahead of them, so that
// what is written is in the cache still, and digests do not take a core from writes.
struct Backlog;

// Jobs in order, on one thread, with a ring of slots. All methods may be called from any thread.
class Pipeline {
 public:
  Pipeline(std::vector<Range> slots, std::size_t leaf_nbytes, int waker);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  std::uint64_t put(Job job);     // number of jobs put so far, this one included
  void start();                   // lets the thread do all jobs put so far
  bool help(std::uint64_t count); // does jobs here until `count` are done; false if the next one has no slot
  std::uint64_t num_done() const;
  std::uint64_t num_bytes() const;  // moved or read so far: what a deadline looks at
  std::uint64_t busy_ns() const;  // time spent on jobs, without reads from streams
  bool wake_at(std::uint64_t seen, std::uint64_t count);  // wakes when `count` are done, or more than `seen` and no slot is free; true: now
  bool is_stalled() const;        // no job is being done, and none can begin: there is none, or it has no slot
  int slot_of(std::uint64_t bucket) const;  // -1: none yet
  int assign(std::uint64_t bucket);         // gives it a slot for a caller that fills it; -1: none is free
  void release(std::uint64_t bucket);
  void use_slots(int count);      // only so many of the ring, the first
  std::vector<Result> take(std::size_t count);  // results of the next jobs, which must be done
  void cancel();                  // drops all jobs and results, frees every slot; returns when no memory is touched any more
  void close();                   // the same, and ends the thread
  std::shared_ptr<Backlog> backlog() const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the thread
};

// A run of a stream: memory, or a part of a file whose pages the kernel lends to the socket.
struct Run {
  const unsigned char* data;      // null: of `file`
  std::size_t nbytes;
  int file;
  std::int64_t offset;
};

// Writes runs to a blocking socket, in order, on a thread of its own. The caller owns the socket.
class StreamWriter {
 public:
  StreamWriter(int socket, int waker, std::shared_ptr<Backlog> backlog = nullptr);
  ~StreamWriter();
  StreamWriter(const StreamWriter&) = delete;
  StreamWriter& operator=(const StreamWriter&) = delete;

  void put(std::vector<Run> runs);
  bool is_idle() const;           // the kernel has taken everything
  bool wake_when_idle();          // true: it is idle now
  int error() const;              // errno that ended the stream; 0: none
  std::uint64_t system_ns() const;  // CPU time of the thread inside system calls that take payload
  std::uint64_t thread_ns() const;  // CPU time of the thread
  bool close();                   // shuts the socket down and ends the thread; false if it did not end in ten seconds

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace rl
