/* Options of a policy loss, for the kernels of both devices. The struct and its Python twins are made of the lists below: a new option is
 * a name in one of them, a field of rl_csrc.reference.LossSpec, and its place in native/policy_terms.h. */
#pragma once
#include <stdint.h>

/* Positions in LOSSES, KLS and AGGREGATIONS of rl_csrc.types. */
enum rl_loss { RL_PPO, RL_GSPO, RL_CISPO, RL_SAPO, RL_GMPO, RL_DPPO_TV, RL_DPPO_KL, RL_DRO, RL_REINFORCE };
enum rl_kl { RL_KL_NONE, RL_K1, RL_KL_ABS, RL_K2, RL_K3, RL_K1_PLUS, RL_K3_PLUS };
enum rl_aggregation { RL_TOKEN_MEAN, RL_TOKEN_SUM, RL_SEQ_MEAN_TOKEN_SUM, RL_SEQ_MEAN_TOKEN_MEAN, RL_SEQ_MEAN_TOKEN_SUM_NORM };

#define RL_LOSS_CODES(FIELD) FIELD(loss) FIELD(kl) FIELD(aggregation)
/* clip_dual: infinity for none. */
#define RL_LOSS_NUMBERS(FIELD)                                                                                                       \
  FIELD(clip_low) FIELD(clip_high) FIELD(clip_dual) FIELD(ratio_max) FIELD(tau_pos) FIELD(tau_neg) FIELD(dro_beta) FIELD(k3_max)     \
  FIELD(kl_coef) FIELD(entropy_coef)

#define RL_LOSS_CODE(name) int32_t name;
#define RL_LOSS_NUMBER(name) float name;
typedef struct {
  RL_LOSS_CODES(RL_LOSS_CODE)
  RL_LOSS_NUMBERS(RL_LOSS_NUMBER)
} rl_loss_spec;
