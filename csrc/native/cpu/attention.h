// Attention of one token, whose own key and value are in the cache already, at each instruction-set level.
// scratch: floats for heads per key head, times the size of a key plus the positions it looks at.
#pragma once
#include "rl_csrc/attention.h"

namespace rl {
void paged_token_baseline(const rl_paged_attention* in, int64_t token, float* scratch);
void paged_token_avx2(const rl_paged_attention* in, int64_t token, float* scratch);
void paged_token_avx512(const rl_paged_attention* in, int64_t token, float* scratch);
}  // namespace rl
