#define RL_LEVEL level_amx
#include "cpu/level.h"
