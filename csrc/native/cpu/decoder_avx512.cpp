#if defined(__x86_64__)
#define RL_DECODER decoder_avx512
#include "cpu/level_decoder.h"
#endif
