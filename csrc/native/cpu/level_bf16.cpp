#define RL_LEVEL level_bf16
#include "cpu/level.h"
