#if defined(__x86_64__)
#define RL_PAGED_TOKEN paged_token_avx512
#include "cpu/level_attention.h"
#endif
