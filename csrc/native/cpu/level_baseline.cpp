#define RL_LEVEL level_baseline
#include "cpu/level.h"
