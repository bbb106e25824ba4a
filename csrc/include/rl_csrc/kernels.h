/* The CPU kernels behind a plain C interface, and the structs they share with the CUDA kernels. Addresses, and sizes and
 * strides in elements. Nothing here allocates results; nothing throws. Functions that score labels return 0, or 1 + the
 * position of the first label outside the vocabulary. `threads` is the most threads a call may use. */
#pragma once
#include <stdint.h>

#include "rl_csrc/loss_spec.h"

#pragma GCC visibility push(default) /* the modules export these functions and nothing else */
#ifdef __cplusplus
extern "C" {
#endif

enum rl_dtype { RL_F32 = 0, RL_BF16 = 1, RL_F16 = 2 };

/* Rows of logits and the token scored on each. */
typedef struct {
  const void* data;         /* [rows_in_data, vocab], rows `row_stride` apart, columns adjacent */
  int64_t row_stride;
  int64_t vocab;            /* columns */
  int64_t rows;             /* T: labels scored */
  const int64_t* labels;    /* [T] */
  const int64_t* row_index; /* [T] row of `data` that label i scores; NULL: row i */
  const float* temperature; /* [T]; NULL: `scalar_temperature` for all */
  float scalar_temperature;
  float softcap;            /* 0: none */
  int64_t ignore_index;     /* a label of this value is not scored */
  int64_t vocab_start;      /* global id of column 0 (vocab-parallel shards) */
  int32_t has_ignore;
  int32_t dtype;            /* rl_dtype */
} rl_logits;

/* Results per scored row, each [T] float32 and NULL where not wanted. */
typedef struct {
  float* logprobs;
  float* entropy;
  float* sum_pi_squared;
  float* lse;               /* log-sum-exp of the scaled logits: what the backward needs */
} rl_logprobs_out;

typedef struct {
  const float* logprobs;      /* [T] of the forward */
  const float* lse;           /* [T] of the forward */
  const float* entropy;       /* [T], needed with grad_entropy */
  const float* grad_logprobs; /* [T] upstream gradients; NULL: zero */
  const float* grad_entropy;
  void* grad_logits;          /* may equal in->data: in place */
  int64_t grad_stride;
} rl_logprobs_grad;

/* Packed tokens of a policy update; every array [T], NULL where optional and not given. */
typedef struct {
  const float* logprobs;
  const float* old_logprobs;
  const float* advantages;
  const float* ref_logprobs;   /* optional */
  const float* weights;        /* optional */
  const float* entropy;        /* optional */
  const uint8_t* mask;
  const int64_t* cu_seqlens;   /* [sequences + 1] */
  int64_t tokens, sequences;
  double denominator;
  const float* denominators;   /* [sequences] optional: all that each sequence's tokens are divided by */
} rl_policy_batch;

#define RL_NUM_METRICS 12
#define RL_NUM_STATS 5

int64_t rl_cpu_logprobs(const rl_logits* in, const rl_logprobs_out* out, int threads);
int64_t rl_cpu_logprobs_backward(const rl_logits* in, const rl_logprobs_grad* grad, int threads);
/* Forward and, while a row is still in cache, its gradient. `grad->logprobs`, `lse` and `entropy` are not read. */
int64_t rl_cpu_logprobs_with_grad(const rl_logits* in, const rl_logprobs_out* out, const rl_logprobs_grad* grad, int threads);
int64_t rl_cpu_logprob_stats(const rl_logits* in, float* stats, int threads);
void rl_cpu_stats_merge(const float* stats, int64_t world, int64_t rows, const rl_logprobs_out* out, int threads);

/* A token of each row, drawn by inverting the cumulative distribution at a number that SplitMix64 makes of stream and position. */
typedef struct {
  const int64_t* streams;   /* [rows] */
  const int64_t* positions; /* [rows] */
  const uint8_t* is_greedy; /* [rows] take the most likely token instead; NULL: none */
  int64_t* ids;             /* [rows] */
  float* logprobs;          /* [rows] of the tokens; not finite where the logits are not */
} rl_draw;

/* Float32 logits, one row each; labels, row_index and softcap are not used. */
void rl_cpu_draw(const rl_logits* in, const rl_draw* draw, int threads);

/* loss [1], metrics [RL_NUM_METRICS], grad_logprobs [T], grad_entropy [T] or NULL. */
void rl_cpu_policy_loss(const rl_policy_batch* batch, const rl_loss_spec* spec, float* loss, float* metrics, float* grad_logprobs,
                        float* grad_entropy, int threads);
/* Kind and mask mode: positions in SCAN_KINDS and MASK_MODES. Optional arrays may be NULL. */
typedef struct {
  const float* rewards;
  const float* values;     /* optional */
  const float* rho;        /* optional */
  const uint8_t* mask;     /* optional */
  const float* lam;        /* [B] optional, else scalar_lam */
  const float* bootstrap;  /* [B] optional */
  const int64_t* cu_seqlens;
  int64_t sequences;
  double gamma, scalar_lam, rho_clip, c_clip;
  int32_t kind, mask_mode;
} rl_scan;

void rl_cpu_scan_reverse(const rl_scan* in, float* advantages, float* returns, int threads);
/* Mode: position in GROUP_MODES. Exactly one of group_ids and cu_groups. */
void rl_cpu_group_norm(const float* rewards, const int64_t* group_ids, const int64_t* cu_groups, int64_t size, int64_t groups, int mode,
                       double eps, float* out);
/* out: count, mean, sum of squared distances. mask may be NULL. */
void rl_cpu_masked_moments(const float* x, const uint8_t* mask, int64_t size, double* out, int threads);
void rl_cpu_whiten(const float* x, const uint8_t* mask, int64_t size, double mean, double scale, double shift, float* out, int threads);

/* Copies `num` spans; none may overlap another's destination. */
void rl_cpu_copy_spans(const void* const* sources, void* const* destinations, const int64_t* nbytes, int64_t num, int threads);

/* What benchmarks hold the kernels against: read every byte once; read and write every byte once, in place. */
uint64_t rl_cpu_read_floor(const void* data, int64_t nbytes);
void rl_cpu_rewrite_floor(void* data, int64_t nbytes);

/* LM head on tiles (AMX, or the bf16 products of AVX-512), bf16 operands. `in` carries labels and options (its data, row_index and
 * dtype are not used; vocab is that of the weight). The logits are never stored. */
int rl_cpu_has_tiles(void);
typedef struct {
  const uint16_t* hidden;  /* [rows, width] bf16, rows `hidden_stride` apart; width a multiple of 32 */
  int64_t hidden_stride;
  const uint16_t* weight;  /* [vocab, width] bf16, rows `weight_stride` apart */
  int64_t weight_stride;
  const float* bias;       /* [vocab] optional */
  int64_t width;
} rl_linear;
/* With `kept` [vocab, padded rows] bf16 and `kept_top` [ceil(vocab / 32), padded rows] float32 (both or neither; no bias, no
 * softcap, no sum_pi_squared; rows padded to a multiple of 32), what rl_cpu_linear_rescale needs to make the gradient without
 * another product. */
int64_t rl_cpu_linear_logprobs(const rl_logits* in, const rl_linear* linear, const rl_logprobs_out* out, uint16_t* kept, float* kept_top,
                               int threads);
/* Turns `kept` into the transposed gradient of the logits, in place. grad->entropy and grad_entropy are not used. */
void rl_cpu_linear_rescale(const rl_logits* in, const rl_logprobs_grad* grad, uint16_t* kept, const float* kept_top, int threads);
/* The gradient of the logits of vocabulary rows [first, last), transposed: out [last - first, padded rows] bf16, where the
 * rows are padded to a multiple of 32 and padding is 0. grad->grad_logits and grad_stride are not used. */
void rl_cpu_linear_gradient(const rl_logits* in, const rl_linear* linear, const rl_logprobs_grad* grad, int64_t first, int64_t last,
                            uint16_t* out, int threads);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
