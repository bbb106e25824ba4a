#define RL_LEVEL level_avx2
#include "cpu/level.h"
