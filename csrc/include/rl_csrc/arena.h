// Blocks of shared memory with generations and per-process pin counts. Plain C++ for Linux, no Python.
//
// The owner alone allocates and frees; where blocks lie is its own business (Python, arena.py). What must be shared is here: for
// each block its generation (odd: live), offset and length, and for each process how many pins it holds on each block. A pin
// count is written by its own process only, so those of a process that died can be dropped whole.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

#include "rl_csrc/shared_memory.h"

namespace rl {

constexpr unsigned char kArenaMagic[8] = {'R', 'L', 'A', 'R', 'E', 'N', '0', '1'};
constexpr std::uint32_t kMaxClients = 64;

enum class ClientState : std::uint32_t { free = 0, joining = 1, attached = 2 };

struct alignas(64) ClientLine {
  std::atomic<ClientState> state;
  Process process;
};

struct ArenaHeader {
  unsigned char magic[8];
  std::uint64_t num_blocks;
  std::uint64_t data_nbytes;
  ClientLine clients[kMaxClients];  // line 0 is the owner's
};

struct alignas(32) BlockLine {
  std::atomic<std::uint64_t> generation;
  std::atomic<std::uint64_t> offset;
  std::atomic<std::uint64_t> nbytes;
};

// One process's view of an arena; shared by the pins it hands out, so that the mapping outlives them.
class ArenaMapping {
 public:
  ArenaMapping(const char* name, std::uint64_t data_nbytes, std::uint64_t num_blocks, bool prefault);  // the owner
  ArenaMapping(int fd, bool prefault);  // a client; std::invalid_argument, std::runtime_error
  ~ArenaMapping();

  // Owner only. `open` makes a free block live and returns its generation; `retire` makes it stale for everybody.
  std::uint64_t open(std::uint64_t block, std::uint64_t offset, std::uint64_t nbytes);
  void retire(std::uint64_t block);
  std::uint64_t pins(std::uint64_t block) const;  // of all processes
  int drop_dead_clients();                        // returns how many processes were found dead

  // Any process. Null if the generation is not the live one.
  unsigned char* pin(std::uint64_t block, std::uint64_t generation, std::uint64_t& nbytes);
  void unpin(std::uint64_t block);

  std::uint64_t num_blocks() const { return num_blocks_; }
  std::uint64_t data_nbytes() const { return data_nbytes_; }
  std::size_t data_offset() const;
  const std::shared_ptr<SharedMemory>& memory() const { return memory_; }
  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(memory_->data()); }

 private:
  std::size_t blocks_offset() const;
  std::size_t counts_offset() const;
  BlockLine& line(std::uint64_t block) const;
  std::atomic<std::uint32_t>& count(std::uint32_t client, std::uint64_t block) const;

  std::uint64_t num_blocks_ = 0, data_nbytes_ = 0;
  std::shared_ptr<SharedMemory> memory_;
  std::uint32_t client_ = 0, creator_;
};

}  // namespace rl
