#define RL_PAGED_TOKEN paged_token_baseline
#include "cpu/level_attention.h"
