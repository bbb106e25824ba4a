// Runs a grid on one CPU thread: its clusters in turn, the blocks of a cluster by turns, and so a block's warps, each as far as it gets
// alone. Each thread is a fiber that runs until it has to wait. What a GPU leaves open is chosen by `configure`: the order of fibers,
// warps and blocks, and when what was sent asynchronously arrives. Where nobody can go on, or a thread does what faults, the launch
// fails with the thread's place.
#include <sys/mman.h>

#include <deque>
#include <mutex>
#include <new>
#include <numeric>
#include <random>

#include "scheduler.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

emulated::Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

Shape shape;
std::vector<Block> blocks;
Meeting cluster;
int rank_now;
Fiber* fiber_now;
bool has_failed;
std::string fault_text;

enum Order { kAscending, kDescending, kShuffled };
static struct {
  int order = kAscending;  // descending and shuffled also let what is sent asynchronously arrive as late as can be
  unsigned seed = 0;
  int compute_capability = 9, resident = 2;
} options;

std::string last_error;
std::mutex one_launch;

constexpr int kPoison = 0xff;  // a NaN, or -1
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 64 << 10;
#else
constexpr size_t kStackBytes = 16 << 10;
#endif
constexpr size_t kStackStep = kStackBytes + 320;  // so that not all stacks' tops fall into the same lines of the cache
constexpr size_t kMaxFibers = 8 * 1024;

// The launch that runs.
const void* kernel_address;
void (*body)(void*);
void* context;
std::deque<Fiber> fibers;   // of the cluster, block by block; kept from launch to launch
char* stacks = nullptr;
std::vector<Sent> sent;
std::mt19937 generator;
jmp_buf scheduler;
Region variables;  // this OS thread's copy of the module's thread-local variables: the block's shared ones

std::string place(const Site& at) {
  const std::string path = at.file_name();
  return path.substr(path.rfind('/') + 1) + ":" + std::to_string(at.line());
}

void fail(const std::string& what) {
  if (!has_failed) last_error = name_of(kernel_address) + ": " + what;
  has_failed = true;
}

std::string who(int fiber) {
  return "block " + std::to_string(blocks[size_t(fiber / shape.threads)].index.x) + ", thread " + std::to_string(fiber % shape.threads);
}

// ---- fibers ----------------------------------------------------------------------------------------------------------

#if defined(__SANITIZE_ADDRESS__)
const void* main_stack;
size_t main_stack_bytes;
void leave(const void* stack, size_t bytes) { __sanitizer_start_switch_fiber(nullptr, stack, bytes); }
void enter(const void** stack, size_t* bytes) { __sanitizer_finish_switch_fiber(nullptr, stack, bytes); }
#endif

void back_to_scheduler() {
#if defined(__SANITIZE_ADDRESS__)
  leave(main_stack, main_stack_bytes);
#endif
  _longjmp(scheduler, 1);
}

void fiber_main() {
  for (;;) {
#if defined(__SANITIZE_ADDRESS__)
    enter(&main_stack, &main_stack_bytes);
#endif
    body(context);
    fiber_now->is_done = true;
    --blocks[size_t(rank_now)].running;
    if (_setjmp(fiber_now->context) == 0) back_to_scheduler();
  }
}

// Run it until it waits, ends or faults.
void resume(int number) {
  Fiber& fiber = fibers[size_t(number)];
  fiber_now = &fiber;
  threadIdx = {unsigned(number % shape.threads), 0, 0};
  fiber.is_waiting = false;
  if (_setjmp(scheduler) == 0) {
    char* stack = stacks + size_t(number) * kStackStep;
#if defined(__SANITIZE_ADDRESS__)
    leave(stack, kStackBytes);
#endif
    if (fiber.is_made) _longjmp(fiber.context, 1);
    fiber.is_made = true;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack, kStackBytes);
#endif
    getcontext(&fiber.first);
    fiber.first.uc_stack.ss_sp = stack;
    fiber.first.uc_stack.ss_size = kStackBytes;
    fiber.first.uc_link = nullptr;
    makecontext(&fiber.first, fiber_main, 0);
    setcontext(&fiber.first);
  }
#if defined(__SANITIZE_ADDRESS__)
  enter(nullptr, nullptr);
#endif
  if (!fault_text.empty()) fail(who(number) + ": " + fault_text + " at " + place(fiber.at) + ".");
  fault_text.clear();
}

void pause() {
  fiber_now->is_waiting = true;
  if (_setjmp(fiber_now->context) == 0) back_to_scheduler();
#if defined(__SANITIZE_ADDRESS__)
  enter(&main_stack, &main_stack_bytes);
#endif
}

void wait_for(const char* what, const unsigned* number, const Barrier* barrier, unsigned seen, const Site& at) {
  fiber_now->what = what;
  fiber_now->at = at;
  fiber_now->number = number;
  fiber_now->barrier = barrier;
  fiber_now->seen = seen;
  pause();
}

bool can_run(const Fiber& fiber) {
  if (fiber.is_done) return false;
  if (!fiber.is_waiting) return true;
  return fiber.number ? *fiber.number != fiber.seen : (fiber.barrier->phase & 1) != fiber.seen;
}

void meet(Meeting& meeting, unsigned wanted, const char* what, const Site& at) {
  if (meeting.arrived == 0) {
    meeting.what = what;
    meeting.at = at;
  } else if (meeting.at.line() != at.line() || strcmp(meeting.at.file_name(), at.file_name()) || strcmp(meeting.what, what)) {
    const std::string other = std::string(meeting.what) + " at " + place(meeting.at);
    fault((std::string(what) + ", while others meet in " + other).c_str(), at);
  }
  if (++meeting.arrived == wanted) {
    meeting.arrived = 0;
    ++meeting.number;
  } else {
    wait_for(what, &meeting.number, nullptr, meeting.number, at);
  }
}

// ---- blocks ----------------------------------------------------------------------------------------------------------

void switch_to(int rank) {
  if (rank != rank_now) {
    memcpy(blocks[size_t(rank_now)].image.data(), variables.begin, variables.size);
    memcpy(variables.begin, blocks[size_t(rank)].image.data(), variables.size);
    rank_now = rank;
  }
  blockIdx = blocks[size_t(rank)].index;
}

// Where this block's `p` lies in the block `rank`.
char* in_block(int rank, void* p) {
  char* const address = static_cast<char*>(p);
  if (rank == rank_now) return address;
  if (address >= variables.begin && address < variables.begin + variables.size)
    return blocks[size_t(rank)].image.data() + (address - variables.begin);
  return reinterpret_cast<char*>(blocks[size_t(rank)].added.get()) + (address - reinterpret_cast<char*>(blocks[size_t(rank_now)].added.get()));
}

// Whether that ends a phase of the barrier.
bool arrive(const Sent& s) {
  if (s.from) {
    memcpy(s.to, s.from, s.bytes);
  } else {
    memcpy(in_block(s.rank, s.to), &s.value, s.bytes);
  }
  auto* barrier = reinterpret_cast<Barrier*>(in_block(s.rank, s.barrier));
  const Block& block = blocks[size_t(s.rank)];
  if (barrier->magic != Barrier::kMagic || block.running == 0) {
    fail("bytes for a barrier of block " + std::to_string(block.index.x) + (block.running ? ", which is not made." : ", which has ended."));
    return true;
  }
  barrier->bytes -= int32_t(s.bytes);
  return barrier->complete_if_done();
}

void send(const Sent& s) {
  if (options.order == kAscending) {
    arrive(s);
  } else {
    sent.push_back(s);
  }
}

// 0 to count - 1 in the order chosen; a shuffled one is another each time.
std::vector<int> ordered(int count) {
  std::vector<int> found(static_cast<size_t>(count));
  std::iota(found.begin(), found.end(), 0);
  if (options.order == kDescending) std::reverse(found.begin(), found.end());
  if (options.order == kShuffled) std::shuffle(found.begin(), found.end(), generator);
  return found;
}

void begin_cluster(int64_t first_block) {
  cluster = Meeting{};
  sent.clear();
  for (int rank = 0; rank < shape.cluster; ++rank) {
    Block& block = blocks[size_t(rank)];
    block.index = {unsigned(first_block + rank), 0, 0};
    block.meeting = Meeting{};
    block.warps.assign(size_t((shape.threads + 31) / 32), Meeting{});
    if (shape.cluster > 1) block.image.assign(variables.size, char(kPoison));
    if (shape.shared_bytes) {
      block.added.reset(new uint4[size_t(shape.shared_bytes + 15) / 16]);
      memset(block.added.get(), kPoison, size_t(shape.shared_bytes));
    }
    block.running = shape.threads;
    block.has_started = false;
  }
  memset(variables.begin, kPoison, variables.size);
  rank_now = 0;
  for (int i = 0; i < shape.cluster * shape.threads; ++i) {
    Fiber& fiber = fibers[size_t(i)];
    fiber.is_done = fiber.is_waiting = fiber.has_arrived_at_cluster = false;
  }
}

// Every warp of the block that can run does so, as far as it gets without the others; whether one could.
bool sweep(int rank) {
  bool any = false;
  for (const int warp : ordered((shape.threads + 31) / 32)) {
    for (bool moves = true; moves;) {
      moves = false;
      for (const int lane : ordered(std::min(32, shape.threads - warp * 32))) {
        const int number = rank * shape.threads + warp * 32 + lane;
        if (!can_run(fibers[size_t(number)])) continue;
        blocks[size_t(rank)].has_started = any = moves = true;
        resume(number);
        if (has_failed) return false;
      }
    }
  }
  return any;
}

void report_stuck() {
  int stuck = 0, ended = 0, first = -1;
  for (int i = 0; i < shape.cluster * shape.threads; ++i) {
    if (fibers[size_t(i)].is_done) {
      ++ended;
    } else {
      ++stuck;
      if (first < 0) first = i;
    }
  }
  const Fiber& fiber = fibers[size_t(first)];
  fail(who(first) + " waits for ever in " + fiber.what + " at " + place(fiber.at) + ", as do " + std::to_string(stuck - 1) + " others; " +
       std::to_string(ended) + " threads of the cluster have ended.");
}

void run_cluster(int64_t first_block) {
  begin_cluster(first_block);
  while (!has_failed) {
    bool any = false;
    for (const int rank : ordered(shape.cluster)) {
      switch_to(rank);
      while (sweep(rank)) any = true;
      if (has_failed) return;
    }
    if (any) continue;
    bool wakes = false;
    while (!wakes && !sent.empty()) {  // as late as can be, in any order
      std::swap(sent[generator() % sent.size()], sent.back());
      const Sent s = sent.back();
      sent.pop_back();
      wakes = arrive(s);
    }
    if (wakes) continue;
    for (const Block& block : blocks)
      if (block.running) return report_stuck();
    return;
  }
}

struct FreeShared {
  ~FreeShared() { blocks.clear(); }
};

int count_resident(const Shape& wanted, int* clusters) {
  if (wanted.shared_bytes > 227 << 10) return cudaErrorInvalidValue;
  *clusters = options.resident;
  return cudaSuccess;
}

int run(const void* kernel, const Shape& wanted, void (*thread_body)(void*), void* thread_context) {
  if (wanted.blocks <= 0 || wanted.blocks >= int64_t(1) << 31 || wanted.threads <= 0 || wanted.threads > 1024 || wanted.cluster > 8)
    return cudaErrorInvalidConfiguration;
  const std::lock_guard<std::mutex> lock(one_launch);
  shape = wanted, kernel_address = kernel, body = thread_body, context = thread_context;
  has_failed = false;
  const size_t count = size_t(shape.cluster) * size_t(shape.threads);
  if (stacks == nullptr) {
    void* const room = mmap(nullptr, kMaxFibers * kStackStep, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return cudaErrorMemoryAllocation;
    madvise(room, kMaxFibers * kStackStep, MADV_HUGEPAGE);
    stacks = static_cast<char*>(room);
  }
  while (fibers.size() < count) fibers.emplace_back();
  blocks = std::vector<Block>(size_t(shape.cluster));
  const FreeShared free_shared;
  variables = find_variables();
  const std::vector<char> callers(variables.begin, variables.begin + variables.size);
  blockDim = {unsigned(shape.threads), 1, 1};
  gridDim = {unsigned(shape.blocks), 1, 1};
  generator.seed(options.seed);
  const int64_t clusters = shape.blocks / shape.cluster;
  for (const int c : ordered(int(clusters))) {
    run_cluster(int64_t(c) * shape.cluster);
    if (has_failed) break;
  }
  memcpy(variables.begin, callers.data(), callers.size());
  if (has_failed)
    for (Fiber& fiber : fibers) fiber.is_made = false;
  return has_failed ? cudaErrorLaunchFailure : cudaSuccess;
}

}  // namespace emulated

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    default: return "cudaErrorNotSupported";
  }
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? emulated::last_error.c_str() : cudaGetErrorName(error);
}

int cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = emulated::options.compute_capability;
  return cudaSuccess;
}

// `order`: 0 ascending, 1 descending, 2 shuffled by `seed`. `compute_capability`: its first number. `resident`: clusters on the device.
extern "C" __attribute__((visibility("default"))) void rl_emulated_configure(int order, unsigned seed, int compute_capability, int resident) {
  emulated::options = {order, seed, compute_capability, resident};
}
