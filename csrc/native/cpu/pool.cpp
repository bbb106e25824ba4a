#include "cpu/pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace rl {
namespace {

using Body = std::function<void(std::int64_t, std::int64_t)>;

struct Job {
  const Body* body = nullptr;
  std::int64_t size = 0, grain = 1;
  std::atomic<std::int64_t> next{0};

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
  void run(Job& job, int threads) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      while (static_cast<int>(num_workers_) < threads - 1) {
        std::thread([this, index = num_workers_] { work(index); }).detach();
        ++num_workers_;
      }
      job_ = &job;
      wanted_ = threads - 1;
      running_ = wanted_;
      ++generation_;
    }
    wake_.notify_all();
    job.run();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    job_ = nullptr;
  }

  std::mutex busy;  // held by the one call that uses the pool

 private:
  void work(int index) {
    std::uint64_t seen = 0;
    for (;;) {
      Job* job = nullptr;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_ != seen && job_ != nullptr; });
        seen = generation_;
        if (index >= wanted_) continue;
        job = job_;
      }
      job->run();
      std::lock_guard<std::mutex> guard(mutex_);
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  std::uint64_t generation_ = 0;
  int wanted_ = 0, running_ = 0, num_workers_ = 0;
};

std::atomic<Pool*> current{nullptr};

// The threads of the parent do not exist in the child, and its locks may be held: the child forgets the pool.
void forget_in_child() { current.store(nullptr); }

Pool& pool() {
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
  Pool& shared = pool();
  std::unique_lock<std::mutex> mine(shared.busy, std::try_to_lock);
  if (!mine.owns_lock()) return body(0, size);
  Job job;
  job.body = &body;
  job.size = size;
  job.grain = grain;
  shared.run(job, threads);
}

}  // namespace rl
