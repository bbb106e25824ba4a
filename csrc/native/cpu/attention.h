// Attention of one token, whose own key and value are in the cache already, at each instruction-set level.
// The positions it looks at are rounded up to kPagedBlock: scratch has room for them and the size of a key, times the heads per
// key head, and slots for them.
#pragma once
#include "rl_csrc/attention.h"

namespace rl {
constexpr int64_t kPagedBlock = 16;  // the most lanes of a level
void paged_token_baseline(const rl_paged_attention* in, int64_t token, float* scratch, int64_t* slots);
void paged_token_avx2(const rl_paged_attention* in, int64_t token, float* scratch, int64_t* slots);
void paged_token_avx512(const rl_paged_attention* in, int64_t token, float* scratch, int64_t* slots);
}  // namespace rl
