#include "rl_csrc/pipeline.h"

#include <pthread.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/sendfile.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "rl_csrc/digest.h"

namespace rl {
namespace {

using Lock = std::unique_lock<std::mutex>;

constexpr std::size_t kMaxBuffers = 512;  // of one system call; the kernel's limit is 1,024

void wake(int waker) {
  const char byte = '!';
  while (send(waker, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }  // a full socket is readable already, and a closed one has nobody to wake
}

std::uint64_t nanoseconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1000000000u + static_cast<std::uint64_t>(now.tv_nsec);
}

std::vector<std::uint64_t> move_piece(const Piece& piece, unsigned char* to, const unsigned char* from, std::size_t leaf_nbytes) {
  std::vector<std::uint64_t> leaves;
  if (!piece.is_digested) {
    if (piece.is_copied && piece.nbytes) std::memcpy(to, from, piece.nbytes);
    return leaves;
  }
  std::size_t start = 0;
  do {
    const std::size_t size = std::min(leaf_nbytes, piece.nbytes - start);
    const std::uint64_t sum = piece.is_copied ? digest_copy(to + start, from + start, size, 0) : digest_sum(from + start, size, 0);
    leaves.push_back(digest_finish(sum, size));
    start += size;
  } while (start < piece.nbytes);
  return leaves;
}

// A thread that outlives its owner for as long as its last step takes: it shares the state. No thread to be had is an error of
// the caller. A forked child has the state without the thread, and must not wait for it.
template <class State>
void start_thread(const std::shared_ptr<State>& state, [[maybe_unused]] const char* name) {
  std::thread thread([state] { state->run(); });
#if defined(__linux__)
  pthread_setname_np(thread.native_handle(), name);
#endif
  thread.detach();
}


// Whether all threads share one core: then two that work at once only evict each other's cache.
bool has_one_core() {
#if defined(__linux__)
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 && CPU_COUNT(&cores) == 1;
#else
  return false;
#endif
}

}  // namespace

struct Backlog {
  const std::int64_t most = has_one_core() ? 0 : std::int64_t{16} << 20;  // of each stream: less than what a core's cache holds

  std::mutex mutex;  // of the pipeline
  std::condition_variable work;
  std::int64_t nbytes = 0, num_streams = 0;

  bool is_full() const { return nbytes > most * std::max<std::int64_t>(1, num_streams); }

  void add(std::int64_t more, std::int64_t streams = 0) {
    {
      const Lock lock(mutex);
      const bool was_full = is_full();
      nbytes += more;
      num_streams += streams;
      if (!was_full || is_full()) return;
    }
    work.notify_one();
  }
};

struct Pipeline::State {
  std::vector<Range> slots;
  std::size_t leaf_nbytes;
  int waker;
  const pid_t process = getpid();

  const std::shared_ptr<Backlog> backlog = std::make_shared<Backlog>();
  std::mutex& mutex = backlog->mutex;
  std::condition_variable& work = backlog->work;
  std::condition_variable rest;
  std::deque<Job> jobs;
  std::deque<Result> results;
  std::vector<bool> is_used;
  std::unordered_map<std::uint64_t, int> slot_of;
  std::size_t num_slots;
  std::uint64_t num_put = 0, num_done = 0, num_started = 0, wake_at = UINT64_MAX;
  bool has_thread = false, is_running = false, is_closed = false;
  int stream = -1;  // being read, so that `cancel` can end it
  std::atomic<bool> is_cancelled{false};
  std::atomic<std::uint64_t> num_bytes{0}, busy_ns{0};

  int assign(std::uint64_t bucket) {
    if (const auto found = slot_of.find(bucket); found != slot_of.end()) return found->second;
    for (std::size_t i = 0; i < num_slots; ++i) {
      if (is_used[i]) continue;
      is_used[i] = true;
      return slot_of[bucket] = static_cast<int>(i);
    }
    return -1;
  }

  // Whether the thread should wait for streams: the next job only reads what they are to write.
  bool is_ahead() const { return !jobs.empty() && !jobs.front().pieces.empty() && !jobs.front().pieces.front().is_copied && jobs.front().bucket >= 0 && backlog->is_full(); }

  bool can_step() { return !jobs.empty() && (jobs.front().bucket < 0 || assign(static_cast<std::uint64_t>(jobs.front().bucket)) >= 0); }

  bool read(Job& job, Result& result) {
    std::size_t first = 0;
    while (first < job.reads.size()) {
      iovec buffers[kMaxBuffers];
      const std::size_t count = std::min(kMaxBuffers, job.reads.size() - first);
      for (std::size_t i = 0; i < count; ++i) buffers[i] = {job.reads[first + i].data, job.reads[first + i].nbytes};
      msghdr message{};
      message.msg_iov = buffers;
      message.msg_iovlen = count;
      const ssize_t found = recvmsg(job.stream, &message, MSG_WAITALL);  // in one call, or what came before its timeout
      if (found <= 0) {
        if (found < 0 && (errno == EINTR || errno == EAGAIN) && !is_cancelled) continue;
        result.error = found == 0 ? Result::kClosed : errno;
        return false;
      }
      num_bytes += static_cast<std::uint64_t>(found);
      for (std::size_t left = static_cast<std::size_t>(found); first < job.reads.size();) {
        Range& range = job.reads[first];
        const std::size_t taken = std::min(left, range.nbytes);
        range.data += taken;
        range.nbytes -= taken;
        left -= taken;
        if (range.nbytes) break;
        ++first;
      }
    }
    return true;
  }

  void step(Lock& lock) {
    Job job = std::move(jobs.front());
    jobs.pop_front();
    unsigned char* const slot = job.bucket < 0 ? nullptr : slots[static_cast<std::size_t>(slot_of.at(static_cast<std::uint64_t>(job.bucket)))].data;
    Result result;
    is_running = true;
    stream = job.stream;
    lock.unlock();
    if (job.reads.empty() || read(job, result)) {
      const std::uint64_t since = nanoseconds(CLOCK_MONOTONIC);
      result.leaves.reserve(job.pieces.size());
      for (const Piece& piece : job.pieces) {
        if (is_cancelled) break;
        unsigned char* const to = piece.to || !piece.is_copied ? piece.to : slot + piece.slot_offset;
        result.leaves.push_back(move_piece(piece, to, piece.from ? piece.from : slot + piece.slot_offset, leaf_nbytes));
        num_bytes += piece.nbytes;
      }
      busy_ns += nanoseconds(CLOCK_MONOTONIC) - since;
    }
    result.owner = std::move(job.owner);
    lock.lock();
    is_running = false;
    stream = -1;
    results.push_back(std::move(result));
    ++num_done;
    if (num_done >= wake_at || (wake_at != UINT64_MAX && num_done < num_started && !can_step())) {
      wake_at = UINT64_MAX;
      wake(waker);
    }
    rest.notify_all();
  }

  void run() {
    Lock lock(mutex);
    for (;;) {
      work.wait(lock, [&] { return is_closed || (!is_running && !is_cancelled && num_done < num_started && !is_ahead() && can_step()); });
      if (is_closed) break;
      step(lock);
    }
    rest.notify_all();
  }
};

Pipeline::Pipeline(std::vector<Range> slots, std::size_t leaf_nbytes, int waker) : state_(std::make_shared<State>()) {
  state_->is_used.resize(slots.size());
  state_->num_slots = slots.size();
  state_->slots = std::move(slots);
  state_->leaf_nbytes = leaf_nbytes;
  state_->waker = waker;
}

Pipeline::~Pipeline() { close(); }

std::uint64_t Pipeline::put(Job job) {
  const Lock lock(state_->mutex);
  state_->jobs.push_back(std::move(job));
  return ++state_->num_put;
}

void Pipeline::start() {
  {
    const Lock lock(state_->mutex);
    if (!state_->has_thread) {
      start_thread(state_, "rl-pipeline");
      state_->has_thread = true;
    }
    state_->num_started = state_->num_put;
    if (state_->jobs.empty()) return;
  }
  state_->work.notify_one();
}

bool Pipeline::help(std::uint64_t count) {
  State& s = *state_;
  Lock lock(s.mutex);
  while (s.num_done < count) {
    if (s.is_running) {
      s.rest.wait(lock, [&] { return !s.is_running; });
    } else if (s.is_closed || s.is_cancelled || !s.can_step()) {
      return false;
    } else {
      s.step(lock);
    }
  }
  return true;
}

std::uint64_t Pipeline::num_done() const {
  const Lock lock(state_->mutex);
  return state_->num_done;
}

std::shared_ptr<Backlog> Pipeline::backlog() const { return state_->backlog; }

std::uint64_t Pipeline::num_bytes() const { return state_->num_bytes; }
std::uint64_t Pipeline::busy_ns() const { return state_->busy_ns; }

bool Pipeline::wake_at(std::uint64_t seen, std::uint64_t count) {
  State& s = *state_;
  const Lock lock(s.mutex);
  if (s.num_done >= count || (s.num_done > seen && !s.is_running && !s.can_step())) return true;
  s.wake_at = count;
  return false;
}

bool Pipeline::is_stalled() const {
  const Lock lock(state_->mutex);
  return !state_->is_running && !state_->can_step();
}

int Pipeline::slot_of(std::uint64_t bucket) const {
  const Lock lock(state_->mutex);
  const auto found = state_->slot_of.find(bucket);
  return found == state_->slot_of.end() ? -1 : found->second;
}

int Pipeline::assign(std::uint64_t bucket) {
  const Lock lock(state_->mutex);
  return state_->assign(bucket);
}

void Pipeline::release(std::uint64_t bucket) {
  {
    const Lock lock(state_->mutex);
    const auto found = state_->slot_of.find(bucket);
    if (found == state_->slot_of.end()) return;
    state_->is_used[static_cast<std::size_t>(found->second)] = false;
    state_->slot_of.erase(found);
  }
  state_->work.notify_one();
}

void Pipeline::use_slots(int count) {
  {
    const Lock lock(state_->mutex);
    state_->num_slots = std::clamp<std::size_t>(static_cast<std::size_t>(std::max(1, count)), 1, state_->slots.size());
  }
  state_->work.notify_one();
}

std::vector<Result> Pipeline::take(std::size_t count) {
  std::vector<Result> taken;
  const Lock lock(state_->mutex);
  for (; count && !state_->results.empty(); --count) {
    taken.push_back(std::move(state_->results.front()));
    state_->results.pop_front();
  }
  return taken;
}

void Pipeline::cancel() {
  State& s = *state_;
  if (getpid() != s.process) return;  // the thread, and whoever holds the mutex, stayed with the parent
  std::deque<Job> jobs;  // released after the lock
  std::deque<Result> results;
  Lock lock(s.mutex);
  s.is_cancelled = true;
  jobs.swap(s.jobs);
  if (s.stream >= 0) shutdown(s.stream, SHUT_RDWR);
  s.rest.wait(lock, [&] { return !s.is_running; });
  results.swap(s.results);
  s.slot_of.clear();
  std::fill(s.is_used.begin(), s.is_used.end(), false);
  s.num_put = s.num_done = s.num_started = 0;
  s.wake_at = UINT64_MAX;
  s.is_cancelled = false;
  lock.unlock();
}

void Pipeline::close() {
  if (getpid() != state_->process) return;
  cancel();
  {
    const Lock lock(state_->mutex);
    state_->is_closed = true;
  }
  state_->work.notify_all();
}

struct StreamWriter::State {
  int socket, waker;
  std::shared_ptr<Backlog> backlog;
  std::atomic<std::int64_t> num_left{0};

  void count(std::int64_t more) {
    num_left += more;
    if (backlog) backlog->add(more);
  }
  const pid_t process = getpid();

  mutable std::mutex mutex;
  std::condition_variable work, rest;
  std::deque<Run> runs;
  bool has_thread = false, is_writing = false, wakes = false;
  int error = 0;
  std::atomic<bool> is_closed{false};
  std::atomic<std::uint64_t> system_ns{0}, thread_ns{0};

  // As many of the runs as one system call takes; returns the bytes, or -1.
  ssize_t write_some(std::deque<Run>& left) {
    const Run& first = left.front();
    const std::uint64_t since = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    ssize_t written;
    if (!first.data) {
#if defined(__linux__)
      off_t offset = first.offset;
      written = sendfile(socket, first.file, &offset, first.nbytes);
#else
      errno = ENOSYS;
      written = -1;
#endif
    } else {
      iovec buffers[kMaxBuffers];
      std::size_t count = 0;
      for (const Run& run : left) {
        if (!run.data || count == kMaxBuffers) break;
        buffers[count++] = {const_cast<unsigned char*>(run.data), run.nbytes};
      }
      msghdr message{};
      message.msg_iov = buffers;
      message.msg_iovlen = count;
      written = sendmsg(socket, &message, MSG_NOSIGNAL);
    }
    const int number = errno;
    system_ns += nanoseconds(CLOCK_THREAD_CPUTIME_ID) - since;
    errno = number;
    return written;
  }

  int write_all(std::deque<Run>& left) {
    while (!left.empty()) {
      ssize_t written = write_some(left);
      if (written < 0 && (errno == EINTR || errno == EAGAIN) && !is_closed) continue;
      if (written <= 0) return written < 0 ? errno : EPIPE;
      count(-written);
      while (written > 0) {
        Run& run = left.front();
        const std::size_t taken = std::min(static_cast<std::size_t>(written), run.nbytes);
        if (run.data) run.data += taken;
        run.offset += static_cast<std::int64_t>(taken);
        run.nbytes -= taken;
        written -= static_cast<ssize_t>(taken);
        if (!run.nbytes) left.pop_front();
      }
    }
    return 0;
  }

  void run() {
    Lock lock(mutex);
    for (;;) {
      work.wait(lock, [&] { return is_closed || (!error && !runs.empty()); });
      if (is_closed) break;
      std::deque<Run> left;
      left.swap(runs);
      is_writing = true;
      lock.unlock();
      const int found = write_all(left);
      thread_ns = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
      lock.lock();
      is_writing = false;
      if (is_closed) break;
      error = found;
      if (error || (wakes && runs.empty())) {
        wakes = false;
        wake(waker);
      }
    }
    has_thread = false;
    rest.notify_all();
  }
};

StreamWriter::StreamWriter(int socket, int waker, std::shared_ptr<Backlog> backlog) : state_(std::make_shared<State>()) {
  state_->socket = socket;
  state_->waker = waker;
  state_->backlog = std::move(backlog);
  if (state_->backlog) state_->backlog->add(0, 1);
  const timeval patience{1, 0};  // shutting a UNIX socket down does not end a write that waits
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
}

StreamWriter::~StreamWriter() { close(); }

void StreamWriter::put(std::vector<Run> runs) {
  std::int64_t more = 0;
  for (const Run& run : runs) more += static_cast<std::int64_t>(run.nbytes);
  state_->count(more);
  {
    const Lock lock(state_->mutex);
    if (!state_->has_thread && !state_->is_closed) {
      start_thread(state_, "rl-stream");
      state_->has_thread = true;
    }
    for (const Run& run : runs)
      if (run.nbytes) state_->runs.push_back(run);
  }
  state_->work.notify_one();
}

bool StreamWriter::is_idle() const {
  const Lock lock(state_->mutex);
  return state_->runs.empty() && !state_->is_writing;
}

bool StreamWriter::wake_when_idle() {
  const Lock lock(state_->mutex);
  state_->wakes = state_->is_writing || !state_->runs.empty();
  return !state_->wakes;
}

int StreamWriter::error() const {
  const Lock lock(state_->mutex);
  return state_->error;
}

std::uint64_t StreamWriter::system_ns() const { return state_->system_ns; }
std::uint64_t StreamWriter::thread_ns() const { return state_->thread_ns; }

bool StreamWriter::close() {
  State& s = *state_;
  if (getpid() != s.process) return true;
  Lock lock(s.mutex);
  s.runs.clear();
  const bool is_first = !s.is_closed.exchange(true);
  if (is_first) shutdown(s.socket, SHUT_RDWR);  // ends a write that waits
  s.work.notify_all();
  const bool has_ended = s.rest.wait_for(lock, std::chrono::seconds(10), [&] { return !s.has_thread; });
  if (is_first && s.backlog) s.backlog->add(-s.num_left, -1);
  return has_ended;
}

}  // namespace rl
