#include "rl_csrc/shared_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <system_error>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace rl {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);  // how soon a death or a signal is noticed

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

struct Stat {
  std::uint64_t started = 0;
  char state = 0;
};

// /proc/<pid>/stat, fields 3 and 22; state 0 if there is no such process.
Stat read_stat(std::uint32_t pid) {
  char path[48], text[1024];
  std::snprintf(path, sizeof(path), "/proc/%u/stat", pid);
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  const ssize_t n = ::read(fd, text, sizeof(text) - 1);
  ::close(fd);
  if (n <= 0) return {};
  text[n] = 0;
  const char* p = std::strrchr(text, ')');  // the command's name may hold anything, parentheses too
  if (!p || p[1] == 0) return {};
  p += 2;
  Stat stat;
  stat.state = *p;
  for (int field = 3; field < 22; ++field) {
    p = std::strchr(p, ' ');
    if (!p) return {};
    ++p;
  }
  stat.started = std::strtoull(p, nullptr, 10);
  return stat;
}

std::uint64_t pid_namespace() {
  struct stat info {};
  return ::stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

}  // namespace

std::shared_ptr<SharedMemory> SharedMemory::create(const char* name, std::size_t nbytes, bool prefault) {
  const int fd = ::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail("memfd_create");
  std::shared_ptr<SharedMemory> memory(new SharedMemory(fd, nbytes));
  if (::ftruncate(fd, static_cast<off_t>(nbytes)) != 0) fail("ftruncate");
  if (prefault && ::fallocate(fd, 0, 0, static_cast<off_t>(nbytes)) != 0) fail("fallocate");
  if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail("F_ADD_SEALS");
  memory->map(prefault);
  return memory;
}

std::shared_ptr<SharedMemory> SharedMemory::attach(int fd, bool prefault) {
  const int own = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) fail("F_DUPFD_CLOEXEC");
  std::shared_ptr<SharedMemory> memory(new SharedMemory(own, 0));
  const int seals = ::fcntl(own, F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK)) throw std::invalid_argument("the descriptor is not a memfd of sealed size");
  struct stat info {};
  if (::fstat(own, &info) != 0) fail("fstat");
  memory->nbytes_ = static_cast<std::size_t>(info.st_size);
  memory->map(prefault);
  return memory;
}

void SharedMemory::map(bool prefault) {
  void* data = ::mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (data == MAP_FAILED) fail("mmap");
  data_ = static_cast<unsigned char*>(data);
  // Older kernels know no MADV_POPULATE_WRITE: there the first touch faults, which is slower and no less right.
  if (prefault) ::madvise(data_, nbytes_, MADV_POPULATE_WRITE);
}

SharedMemory::~SharedMemory() {
  if (data_) ::munmap(data_, nbytes_);
  ::close(fd_);
}

void SharedMemory::discard(std::size_t offset, std::size_t nbytes) const {
  if (::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(nbytes)) != 0)
    fail("FALLOC_FL_PUNCH_HOLE");
}

void set_self(Process& process) {
  const auto pid = static_cast<std::uint32_t>(::getpid());
  process.namespace_ = pid_namespace();
  process.started = read_stat(pid).started;
  process.pid = pid;
}

bool is_alive(const Process& process) {
  if (process.namespace_ != pid_namespace()) return true;
  const Stat stat = read_stat(process.pid);
  return stat.state != 0 && stat.state != 'Z' && stat.state != 'X' && stat.started == process.started;
}

void Doorbell::ring() {
  count.fetch_add(1);
  if (waiters.load() != 0) ::syscall(SYS_futex, &count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void wait_a_while(Doorbell& bell, std::uint32_t seen, Deadline deadline) {
  using std::chrono::nanoseconds;
  const auto left = std::min<nanoseconds>(std::chrono::duration_cast<nanoseconds>(deadline - std::chrono::steady_clock::now()), kSlice);
  if (left.count() <= 0) return;
  const timespec timeout{static_cast<time_t>(left.count() / 1000000000), static_cast<long>(left.count() % 1000000000)};
  bell.waiters.fetch_add(1);
  ::syscall(SYS_futex, &bell.count, FUTEX_WAIT, seen, &timeout, nullptr, 0);
  bell.waiters.fetch_sub(1);
}

}  // namespace rl
