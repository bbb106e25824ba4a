// The kernels of one instruction-set level. Each level_*.cpp defines RL_LEVEL and includes this file; the compile options of
// that file choose the instructions. Nothing here may come from a std template: the linker merges those across files.
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <stdint.h>

#include "cpu/levels.h"

namespace rl {
namespace {
#include "cpu/vec.h"
#include "cpu/level_tanh.h"
#include "cpu/level_softmax.h"
#include "cpu/level_policy.h"
#include "cpu/level_draw.h"
}  // namespace

const Level& RL_LEVEL() {
  static constexpr Level kernels{row_stats, row_gradient, policy_tokens, row_pick, row_top};
  return kernels;
}

}  // namespace rl
