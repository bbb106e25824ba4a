// Threads of the CPU kernels and of copies: small pools, started when first wanted and started anew in a forked child.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>

namespace rl {

// Calls body(begin, end) for disjoint pieces that cover [0, size), on up to `threads` threads including the caller's. Pieces
// are handed out in units of `grain`; which thread takes which is not fixed, so body must not let it matter. While another
// call uses the pool, the caller does all the work itself; a thread that got no core in time is not waited for.
void parallel_for(std::int64_t size, std::int64_t grain, int threads, const std::function<void(std::int64_t, std::int64_t)>& body);

// A parallel_for that a thread, apart from the kernels' and the only one, begins while the caller does something else.
// `finish`, and the end of its life, does what is left together with that thread: all of it, where the thread got no core
// meanwhile or works for another. One thread at a time.
class Begun {
 public:
  Begun(std::int64_t size, std::int64_t grain, std::function<void(std::int64_t, std::int64_t)> body);
  ~Begun();
  Begun(const Begun&) = delete;
  void finish();

 private:
  struct Shared;
  std::unique_ptr<Shared> shared_;
};

}  // namespace rl
