#include "cpu/levels.h"

#include "isa.h"

namespace rl {

const Level& level() {
#if defined(__x86_64__)
  switch (isa_level()) {
    case kAmxLevel: return level_amx();
    case static_cast<int>(Isa::avx512): return level_avx512();
    case static_cast<int>(Isa::avx2): return level_avx2();
    default: break;
  }
#endif
  return level_baseline();
}

}  // namespace rl
