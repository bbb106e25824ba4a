#if defined(__x86_64__)
#define RL_PAGED_TOKEN paged_token_avx2
#include "cpu/level_attention.h"
#endif
