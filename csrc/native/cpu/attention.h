// Attention of one token, whose own key and value are in the cache already, at each instruction-set level.
// The positions it looks at are rounded up to kPagedBlock: scratch has room for them and the size of a key, times the heads, and
// slots for them.
#pragma once
#include "rl_csrc/attention.h"

namespace rl {
constexpr int64_t kPagedBlock = 16;  // the most lanes of a level
void paged_token_baseline(const rl_paged_attention* in, int64_t token, float* scratch, int64_t* slots);
void paged_token_avx2(const rl_paged_attention* in, int64_t token, float* scratch, int64_t* slots);
void paged_token_avx512(const rl_paged_attention* in, int64_t token, float* scratch, int64_t* slots);

// 1 + a token without a page for a position that it looks at, or would look at further on in its sequence, up to `last` [tokens]; 0: none.
int64_t first_unplaced(const rl_paged_attention& in, const int64_t* last);
void attend_pages(const rl_paged_attention& in, int threads);  // what was not checked is read and written
}  // namespace rl
