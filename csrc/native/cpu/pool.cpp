#include "cpu/pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace rl {
namespace {

using Body = std::function<void(std::int64_t, std::int64_t)>;
using Clock = std::chrono::steady_clock;

// A helper that was waited for so long lost its core in the middle of a piece: others keep the cores busy, and so many of the
// next calls do without it.
constexpr auto kLostCore = std::chrono::microseconds(200);
constexpr int kCallsAlone = 64;

struct Job {
  const Body* body = nullptr;
  std::int64_t size = 0, grain = 1;
  std::atomic<std::int64_t> next{0};
  int running = 0;  // workers that took part and are not done; the pool's mutex guards it

  void run() {
    for (;;) {
      const std::int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= size) return;
      (*body)(begin, std::min(begin + grain, size));
    }
  }
};

class Pool {
 public:
  void begin(Job& job, int threads) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      try {
        while (num_workers_ < threads - 1) {
          std::thread([this, index = num_workers_] { work(index); }).detach();
          ++num_workers_;
        }
      } catch (const std::system_error&) {
        // No more threads to be had: those that there are, and the caller, do it all.
      }
      job_ = &job;
      wanted_ = threads - 1;
      ++generation_;
    }
    wake_.notify_all();
  }

  // Takes part, and waits for the workers that did, which it returns the time of: one that never came to it is not waited for.
  Clock::duration finish(Job& job) {
    job.run();
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;
    if (job.running == 0) return {};
    const auto start = Clock::now();
    done_.wait(lock, [&] { return job.running == 0; });
    return Clock::now() - start;
  }

  std::atomic_flag busy;  // set by the one call that uses the pool
  int num_alone = 0;      // calls that are to do without, which `busy` guards

 private:
  void work(int index) {
    std::uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen && job_ != nullptr; });
      seen = generation_;
      if (index >= wanted_) continue;
      Job& job = *job_;
      ++job.running;
      lock.unlock();
      job.run();
      lock.lock();
      if (--job.running == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  std::uint64_t generation_ = 0;
  int wanted_ = 0, num_workers_ = 0;
};

using Current = std::atomic<Pool*>;
Current for_kernels{nullptr}, for_copies{nullptr};

// The threads of the parent do not exist in the child, and its locks may be held: the child forgets the pools.
void forget_in_child() {
  for_kernels.store(nullptr);
  for_copies.store(nullptr);
}

Pool& pool(Current& current) {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_in_child);
  (void)registered;
  Pool* found = current.load();
  if (found == nullptr) {
    Pool* made = new Pool;  // lives as long as the process: its threads may outlast static destruction
    if (current.compare_exchange_strong(found, made)) return *made;
    delete made;
  }
  return *found;
}

}  // namespace

void parallel_for(std::int64_t size, std::int64_t grain, int threads, const Body& body) {
  if (size <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  const std::int64_t pieces = (size + grain - 1) / grain;
  threads = static_cast<int>(std::min<std::int64_t>(threads, pieces));
  if (threads <= 1) return body(0, size);
  Pool& shared = pool(for_kernels);
  if (shared.busy.test_and_set()) return body(0, size);
  Job job;
  job.body = &body;
  job.size = size;
  job.grain = grain;
  shared.begin(job, threads);
  shared.finish(job);
  shared.busy.clear();
}

struct Begun::Shared {
  Body body;
  Job job;
  Pool* pool = nullptr;  // null: nobody helps
};

Begun::Begun(std::int64_t size, std::int64_t grain, Body body) : shared_(std::make_unique<Shared>()) {
  shared_->body = std::move(body);
  Job& job = shared_->job;
  job.body = &shared_->body;
  job.size = size;
  job.grain = std::max<std::int64_t>(grain, 1);
  Pool& helpers = pool(for_copies);
  if (helpers.busy.test_and_set()) return;
  if (helpers.num_alone > 0) {
    --helpers.num_alone;
    helpers.busy.clear();
    return;
  }
  helpers.begin(job, 2);
  shared_->pool = &helpers;
}

void Begun::finish() {
  if (!shared_) return;
  if (shared_->pool == nullptr) {
    shared_->job.run();
  } else if (shared_->pool == for_copies.load()) {
    if (shared_->pool->finish(shared_->job) > kLostCore) shared_->pool->num_alone = kCallsAlone;
    shared_->pool->busy.clear();
  } else {  // in a child of the process that began it: what the helper did there may be in no memory of this one
    shared_->body(0, shared_->job.size);
  }
  shared_.reset();
}

Begun::~Begun() { finish(); }

}  // namespace rl
