#define RL_DECODER decoder_baseline
#include "cpu/level_decoder.h"
