/* The pass of a decoder of Llama's descendants over a paged cache, behind a plain C interface: float32, inference. Sizes and
 * strides in elements; every array is dense unless a stride stands beside it. */
#pragma once
#include <stdint.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

#define RL_PANEL 32 /* rows of a weight that lie side by side */

/* x -> x W^T + b. */
typedef struct {
  const float* panels;      /* [ceil(outputs / RL_PANEL), inputs, RL_PANEL]: W by groups of rows, each transposed; 0 beyond W */
  const float* bias;        /* [outputs]; NULL: none */
  int64_t inputs, outputs;
} rl_packed_linear;

/* RMSNorm, attention with rotated queries and keys, RMSNorm, gated MLP; both halves are added to what came in. */
typedef struct {
  const float* input_norm;  /* [hidden] scales */
  const float* query_norm;  /* [head_size] scales of each head's RMSNorm before rotation; NULL: none */
  const float* key_norm;
  const float* post_norm;   /* [hidden] before the MLP */
  rl_packed_linear qkv;     /* hidden -> (heads + 2 kv_heads) * head_size: queries, keys, values */
  rl_packed_linear out;     /* heads * head_size -> hidden */
  rl_packed_linear gate_up; /* hidden -> 2 * intermediate: of silu(gate) * up */
  rl_packed_linear down;    /* intermediate -> hidden */
  int64_t window;           /* positions a token sees, its own included; 0: all */
} rl_decoder_layer;

typedef struct {
  const float* embedding;   /* [vocab, hidden] */
  const rl_decoder_layer* layers;
  const float* norm;        /* [hidden] before the head */
  rl_packed_linear head;    /* hidden -> logits */
  const float *cos, *sin;   /* [num_positions, head_size / 2]: number i of a head is turned with number i + head_size / 2 */
  int64_t vocab, hidden, num_layers, heads, kv_heads, head_size, num_positions;
  float eps;                /* of RMSNorm */
  float scaling;            /* multiplies query-key products */
} rl_decoder;

/* New tokens of sequences, as for rl_paged_attention. */
typedef struct {
  const int64_t* ids;       /* [tokens] */
  const int64_t* positions; /* [tokens] */
  const int64_t* rows;      /* [tokens] */
  const int64_t* block_tables;     /* [table_rows, table_stride] */
  const int64_t* which;     /* [num_logits] tokens whose logits are wanted; NULL: all, and num_logits is tokens */
  float* const* key_caches;        /* [num_layers] of [pages, page_size, kv_heads, head_size] */
  float* const* value_caches;
  float* workspace;         /* rl_cpu_decode_workspace numbers */
  float* logits;            /* [num_logits, head.outputs rounded up to RL_PANEL] */
  int64_t tokens, num_logits, table_rows, table_stride, pages, page_size;
} rl_decoder_batch;

/* How each row of a batch draws its tokens, and where it ends. R is the batch's tokens. */
typedef struct {
  const float* temperature;  /* [R] above 0 */
  const int64_t* streams;    /* [R] as for rl_cpu_draw */
  const uint8_t* is_greedy;  /* [R] take the most likely token instead; NULL: none */
  const int64_t* limits;     /* [R] length, with the fed token and all before it, at which a row ends */
  const int64_t* stop_ids;   /* [R, num_stops] tokens with which a row ends; -1 where there are fewer */
  int64_t num_stops, steps;
  const int64_t* interrupt;  /* once it is not 0, every row ends with the step it is in; others may write it meanwhile. NULL: never */
  int64_t* ids;              /* [R, steps] */
  float* logprobs;           /* [R, steps] as of rl_cpu_draw */
  int64_t* counts;           /* [R] tokens that were drawn; what follows them is not written */
} rl_generation;

/* Numbers in the panels of a weight [outputs, inputs]. */
int64_t rl_cpu_packed_size(int64_t outputs, int64_t inputs);
/* weight [outputs, inputs], rows `row_stride` apart. */
void rl_cpu_pack_linear(const float* weight, int64_t row_stride, int64_t outputs, int64_t inputs, float* panels, int threads);

int64_t rl_cpu_decode_workspace(const rl_decoder* decoder, int64_t tokens, int64_t num_logits);
/* Writes keys and values of the tokens into the cache, and logits. Returns 0, or 1 + the first token whose id or position is out of
 * range or that has no page for a position it looks at; then nothing was written. The bits of a token depend neither on the others
 * nor on `threads`. */
int64_t rl_cpu_decode(const rl_decoder* decoder, const rl_decoder_batch* batch, int threads);
/* Up to `steps` times: the pass over the newest token of each row, and the draw of the next. The batch has one token of each sequence,
 * and `which` is NULL. A row ends with a stop id, at its limit, or where its logits are not finite, which its last log-prob tells.
 * What is returned is that of rl_cpu_decode, for all the steps. A row's bits depend neither on the others, nor on `threads`, nor on how
 * many steps one call takes. */
int64_t rl_cpu_generate(const rl_decoder* decoder, const rl_decoder_batch* batch, const rl_generation* generation, int threads);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
