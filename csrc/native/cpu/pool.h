// Threads of the CPU kernels: a small pool, started when first wanted and started anew in a forked child.
#pragma once
#include <cstdint>
#include <functional>

namespace rl {

// Calls body(begin, end) for disjoint pieces that cover [0, size), on up to `threads` threads including the caller's. Pieces
// are handed out in units of `grain`; which thread takes which is not fixed, so body must not let it matter. While another
// call uses the pool, the caller does all the work itself.
void parallel_for(std::int64_t size, std::int64_t grain, int threads, const std::function<void(std::int64_t, std::int64_t)>& body);

}  // namespace rl
