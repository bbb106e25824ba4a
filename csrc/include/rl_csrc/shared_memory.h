// memfd memory shared between processes, futex doorbells, and who is alive. Plain C++ for Linux, no Python.
#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace rl {

// A mapped memfd. Its pages live exactly as long as some process maps it or holds its descriptor: a SIGKILL leaks nothing.
class SharedMemory {
 public:
  // Reserves the memory (so that a full machine is an error here and not a SIGBUS later), seals its size and maps it.
  // `prefault` also makes every page present. Throws std::system_error.
  static std::shared_ptr<SharedMemory> create(const char* name, std::size_t nbytes, bool prefault);

  // Maps what another process created; keeps a duplicate of `fd`. Memory whose size is not sealed is refused: its owner could
  // cut it short under a reader. Throws std::system_error or std::invalid_argument.
  static std::shared_ptr<SharedMemory> attach(int fd, bool prefault);

  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  unsigned char* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }
  int fd() const { return fd_; }

  // Gives the pages of [offset, offset + nbytes) back to the machine; they read as zero and fault when touched again.
  void discard(std::size_t offset, std::size_t nbytes) const;

 private:
  SharedMemory(int fd, std::size_t nbytes) : fd_(fd), nbytes_(nbytes) {}
  void map(bool prefault);

  int fd_;
  std::size_t nbytes_;
  unsigned char* data_ = nullptr;
};

// A process, told apart from a later one with the same number by when it started. Lives in shared memory.
struct Process {
  std::atomic<std::uint32_t> pid;
  std::atomic<std::uint64_t> started;    // clock ticks after boot
  std::atomic<std::uint64_t> namespace_;  // inode of its pid namespace
};

void set_self(Process& process);

// False once the process is gone or a zombie. A process of another pid namespace cannot be seen: it counts as alive, and the
// deadline of the wait decides.
bool is_alive(const Process& process);

// Something to wait on. `ring` after every change that a waiter could be waiting for.
struct Doorbell {
  std::atomic<std::uint32_t> count;
  std::atomic<std::uint32_t> waiters;

  void ring();
};

using Deadline = std::chrono::steady_clock::time_point;

// Sleeps until the bell's count differs from `seen`, a signal arrives, `deadline` passes or 50 ms are over: then look again.
void wait_a_while(Doorbell& bell, std::uint32_t seen, Deadline deadline);

}  // namespace rl
