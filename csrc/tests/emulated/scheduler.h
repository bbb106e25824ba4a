// What the parts of the emulated device share. One launch at a time, so its state stands in plain variables.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <string>
#include <vector>

#include "emulated_device.h"

namespace emulated {

struct Barrier {  // the 8 bytes in shared memory
  uint16_t magic;
  uint8_t phase, pending;
  int32_t bytes;
  static constexpr uint16_t kMagic = 0x6272;
  bool complete_if_done() {
    if (pending || bytes) return false;
    phase ^= 1;
    pending = 1;
    return true;
  }
};

struct Meeting {  // of a warp, a block or a cluster
  unsigned arrived = 0, number = 0;  // at meeting `number`
  const char* what = nullptr;
  Site at;
  uint64_t values[2][32];
};

struct Block {
  Index index;
  Meeting meeting;
  std::vector<Meeting> warps;
  std::vector<char> image;              // its shared variables while another block runs
  std::unique_ptr<uint4[]> added;       // its added shared memory
  int running = 0;
  bool has_started = false;
};

struct Fiber {
  ucontext_t first;  // where it begins
  jmp_buf context;
  bool is_made = false, is_done = true, is_waiting = false;
  const char* what = nullptr;  // it waits for
  Site at;
  const unsigned* number = nullptr;  // waits for this to change from `seen`, or
  unsigned seen = 0;
  const Barrier* barrier = nullptr;  // for this one's phase `seen` to be over
  unsigned cluster_seen = 0;
  bool has_arrived_at_cluster = false;
};

struct Sent {
  int rank;  // of the block whose memory and barrier it is
  char* to;
  const char* from;
  float4 value;
  uint32_t bytes;
  Barrier* barrier;
};

struct Region {
  char* begin = nullptr;
  size_t size = 0;
};

extern Shape shape;
extern std::vector<Block> blocks;  // of the cluster
extern Meeting cluster;
extern int rank_now;
extern Fiber* fiber_now;
extern bool has_failed;
extern std::string fault_text;  // of the fiber that just ended by one

Region find_variables();                  // this OS thread's copy of the module's thread-local variables
std::string name_of(const void* function);  // out of the module's own symbols
std::string place(const Site& at);
void back_to_scheduler();
void wait_for(const char* what, const unsigned* number, const Barrier* barrier, unsigned seen, const Site& at);
void meet(Meeting& meeting, unsigned wanted, const char* what, const Site& at);
char* in_block(int rank, void* p);
void send(const Sent& s);

}  // namespace emulated
