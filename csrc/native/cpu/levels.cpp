#include "cpu/levels.h"

#include "cpu/tiles.h"
#include "isa.h"

namespace rl {

const Level& level() {
#if defined(__x86_64__)
  switch (isa_level()) {
    case kAmxLevel:
    case kBf16Level: return level_bf16();
    case static_cast<int>(Isa::avx512): return level_avx512();
    case static_cast<int>(Isa::avx2): return level_avx2();
    default: break;
  }
#endif
  return level_baseline();
}

const Tiles* tiles() {
#if defined(__x86_64__)
  if (isa_level() == kAmxLevel) return &tiles_amx();
  if (isa_level() == kBf16Level) return &tiles_bf16();
#endif
  return nullptr;
}

}  // namespace rl
