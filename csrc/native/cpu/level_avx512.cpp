#define RL_LEVEL level_avx512
#include "cpu/level.h"
