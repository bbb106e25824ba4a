/* The CUDA kernels behind a plain C interface: device addresses, sizes and strides in elements unless a name says bytes, and a
 * stream. Nothing here allocates, synchronizes or reads a device value on the host, so every call may be captured in a CUDA
 * graph. Each function returns the cudaError_t of its launch (0 is success). */
#pragma once
#include "rl_csrc/kernels.h"

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

enum { RL_CUDA_OUT_OF_MEMORY = 2, RL_CUDA_NOT_SUPPORTED = 801 };
const char* rl_cuda_error_name(int status);
const char* rl_cuda_error_text(int status);
int rl_cuda_runtime_version(int* version);
/* The device that the calling thread launches on. */
int rl_cuda_current_device(int* device);

int rl_cuda_logprobs(const rl_logits* in, const rl_logprobs_out* out, void* stream);

/* Statistics of a vocab shard: `stats` [T, 5] float32 = max z, sum e, sum e * (z - max), sum e^2 with e = exp(z - max), and the
 * label's z: -inf where the label lies in another shard, +inf where it is ignored. */
int rl_cuda_logprob_stats(const rl_logits* in, float* stats, void* stream);
/* Merge `stats` [world, T, 5] in rank order. */
int rl_cuda_stats_merge(const float* stats, int64_t world, int64_t rows, const rl_logprobs_out* out, void* stream);

/* `grad_dtype` (rl_dtype) is of `grad_logits`: that of the logits, or any where they are float32; another one may not overlap them. */
int rl_cuda_logprobs_backward(const rl_logits* in, const rl_logprobs_grad* grad, int32_t grad_dtype, void* stream);
/* Zero the rows [rows, vocab] whose `is_scored` [rows] is 0. */
int rl_cuda_zero_rows(void* data, int32_t dtype, int64_t row_stride, int64_t rows, int64_t vocab, const uint8_t* is_scored,
                      void* stream);

/* Packed tokens [T] and what a policy loss reads beside the log-probs; float32 unless said. */
typedef struct {
  const float* old_logprobs;
  const float* advantages;
  const uint8_t* loss_mask;      /* bool */
  const float* ref_logprobs;     /* NULL without KL */
  const float* weights;          /* NULL: 1 */
  const float* denominator;      /* device scalar; NULL: `scalar_denominator` */
  float scalar_denominator;
  const float* denominators;     /* [B], with RL_SEQ_MEAN_TOKEN_MEAN: all that each sequence's tokens are divided by; or NULL */
} rl_loss_tokens;

typedef struct {
  const float* logprobs;         /* [T] */
  const float* entropy;          /* [T] or NULL */
  const int64_t* cu_seqlens;     /* [B + 1] */
  int64_t tokens, sequences;
  float* loss;                   /* [] */
  float* metrics;                /* [RL_NUM_METRICS] */
  float* grad_logprobs;          /* [T] */
  float* grad_entropy;           /* [T] or NULL */
  float* partials;               /* workspace, rl_cuda_policy_loss_partials() floats */
  uint32_t* counter;             /* workspace: one zero, zero again afterwards */
} rl_loss_io;

int64_t rl_cuda_policy_loss_partials(const rl_loss_spec* spec, int64_t tokens, int64_t sequences);
int rl_cuda_policy_loss(const rl_loss_spec* spec, const rl_loss_tokens* tokens, const rl_loss_io* io, void* stream);

/* Backward recurrences over packed sequences. */
enum rl_scan_kind { RL_GAE, RL_RETURNS, RL_TD_LAMBDA, RL_VTRACE };
enum rl_mask_mode { RL_HOLD, RL_COMPRESS, RL_ZERO, RL_NONE };
typedef struct {
  const float* rewards;          /* [T] */
  const float* values;           /* [T]; NULL: 0 */
  const uint8_t* loss_mask;      /* [T] bool; NULL: all */
  const float* rho;              /* [T]; NULL: 1 */
  const float* lam;              /* [B]; NULL: scalar_lam */
  const float* bootstrap_values; /* [B]; NULL: 0 */
  const int64_t* cu_seqlens;     /* [B + 1] */
  int64_t sequences;
  float scalar_lam, gamma, rho_clip, c_clip;
  int32_t kind, mask_mode;
  float* advantages;             /* [T] */
  float* returns;                /* [T] */
} rl_device_scan;
int rl_cuda_scan_reverse(const rl_device_scan* scan, void* stream);

/* Advantage of each reward in its group: by `cu_groups` [G + 1] (members adjacent) or `group_ids` [B] (G = B then). */
enum rl_group_mode { RL_GRPO, RL_DR_GRPO, RL_RLOO };
int rl_cuda_group_norm(const float* rewards, const int64_t* group_ids, const int64_t* cu_groups, int64_t rows, int64_t groups,
                       int32_t mode, float eps, float* advantages, void* stream);

/* Count, mean and sum of squared distances of the masked entries, float64 [3]; `partials` holds
 * 3 * rl_cuda_moments_blocks(size) doubles, `counter` one zero. */
int64_t rl_cuda_moments_blocks(int64_t size);
int rl_cuda_masked_moments(const float* x, const uint8_t* mask, int64_t size, double* moments, double* partials, uint32_t* counter,
                           void* stream);
/* `moments` float64 [3], read on the device. */
int rl_cuda_whiten(const float* x, const uint8_t* mask, int64_t size, const double* moments, int32_t shift_mean, double eps,
                   float* out, void* stream);

/* Attention of new tokens over a paged cache: their keys and values are written first. See rl_csrc.inference.paged. */
typedef struct {
  const void* query;             /* [T, H, D], of `dtype`, 16-byte aligned, as are the next five */
  const void* key;               /* [T, K, D]; NULL: keys and values lie in the cache already */
  const void* value;             /* [T, K, D] */
  void* key_cache;               /* [N, S, K, D] */
  void* value_cache;             /* [N, S, K, D] */
  void* out;                     /* [T, H, D] */
  const int64_t* block_tables;   /* [R, table_columns] */
  const int64_t* rows;           /* [T] */
  const int64_t* positions;      /* [T] */
  const float* sinks;            /* [H], or NULL */
  float* partial;                /* [T, H, splits, D], where splits > 1 */
  float* stats;                  /* [T, H, splits, 2], where splits > 1 */
  int64_t tokens, heads, kv_heads, size, page_size, table_columns, splits, window; /* window 0: none */
  float scaling, softcap;        /* softcap 0: none */
  int32_t page_shift;            /* log2 of page_size, or -1 */
  int32_t dtype;
} rl_device_attention;
/* Of the most positions that a token may see. */
int64_t rl_cuda_paged_splits(int64_t positions);
/* RL_CUDA_NOT_SUPPORTED where a key is no whole number of 16 bytes, or longer than 1,024: nothing was done. */
int rl_cuda_paged_attention(const rl_device_attention* attention, void* stream);

/* residual += x, out = its RMS norm (1910.07467) times weight. See rl_csrc.inference.layers, as of the next two. */
typedef struct {
  const void* x;                 /* [T, size], of `dtype`; NULL: nothing is added */
  void* residual;                /* [T, size] */
  const void* weight;            /* [size] */
  void* out;                     /* [T, size] */
  int64_t tokens, size;
  float eps;
  int32_t dtype;
} rl_device_add_norm;
int rl_cuda_add_norm(const rl_device_add_norm* arguments, void* stream);

/* Queries and keys normed per head and rotated (RoPE, 2104.09864); keys and values go into their pages. */
typedef struct {
  const void* qkv;               /* [T, H + 2 K, D], of `dtype` */
  const void* query_norm;        /* [D], or NULL */
  const void* key_norm;          /* [D], or NULL */
  const void* cos;               /* [P, D / 2] */
  const void* sin;               /* [P, D / 2] */
  void* query;                   /* [T, H, D] */
  void* key_cache;               /* [N, S, K, D] */
  void* value_cache;             /* [N, S, K, D] */
  const int64_t* block_tables;   /* [R, table_columns] */
  const int64_t* rows;           /* [T] */
  const int64_t* positions;      /* [T] */
  int64_t tokens, heads, kv_heads, size, page_size, table_columns;
  float eps;
  int32_t dtype;
} rl_device_rotate;
/* RL_CUDA_NOT_SUPPORTED where D is odd or above 256: nothing was done. */
int rl_cuda_rotate(const rl_device_rotate* arguments, void* stream);

/* silu(gate) * up of `gate_up` [T, 2, size]. RL_CUDA_NOT_SUPPORTED where a row is no whole number of 16 bytes. */
int rl_cuda_gate(const void* gate_up, void* out, int64_t tokens, int64_t size, int32_t dtype, void* stream);

/* Device memory at an address that stays while the memory comes and goes (the driver's virtual memory management). Sizes are whole
 * multiples of the granularity; each returns the driver's status, whose codes are the runtime's. */
int rl_cuda_map_granularity(int32_t device, uint64_t* nbytes);
int rl_cuda_map_reserve(uint64_t nbytes, uint64_t* address);
/* Takes memory of the device and puts it there; where that fails, nothing is taken. */
int rl_cuda_map_take(int32_t device, uint64_t address, uint64_t nbytes, uint64_t* handle);
/* Gives it back to the driver. Nothing may be using it. */
int rl_cuda_map_give(uint64_t address, uint64_t nbytes, uint64_t handle);
int rl_cuda_map_free(uint64_t address, uint64_t nbytes);

/* A token drawn from each row of logits, and its log-prob. See rl_csrc.inference.sampling. */
typedef struct {
  const void* logits;            /* [B, V], of `dtype` */
  const float* temperature;      /* [B] */
  const int64_t* streams;        /* [B] */
  const int64_t* positions;      /* [B] */
  const uint8_t* is_greedy;      /* [B], or NULL */
  int64_t* ids;                  /* [B] */
  float* logprobs;               /* [B] */
  int64_t rows, vocab, row_stride;
  int32_t dtype;
} rl_device_draw;
/* RL_CUDA_NOT_SUPPORTED for vocabularies beyond 1,048,576. */
int rl_cuda_draw(const rl_device_draw* draw, void* stream);

/* Byte copies, many per launch; the arrays are host memory, read before the call returns. */
int rl_cuda_bucket_copy(const uint64_t* sources, const uint64_t* destinations, const uint64_t* nbytes, int64_t count, void* stream);
/* Digest (FRAMES.md): the unfinished sum of a piece whose first word has number `first_word` (0-based), into `total` [1].
 * `partials` holds rl_cuda_digest_blocks(nbytes) words, `counter` one zero. */
int64_t rl_cuda_digest_blocks(int64_t nbytes);
int rl_cuda_digest(const void* data, int64_t nbytes, uint64_t first_word, uint64_t* total, uint64_t* partials, uint32_t* counter,
                   void* stream);
/* The unfinished sums of `count` pieces, each from word 0, added to `totals` [count], which are zeros; `data` and `nbytes` are host
 * memory, read before the call returns. */
int rl_cuda_digest_many(const uint64_t* data, const uint64_t* nbytes, int64_t count, uint64_t* totals, void* stream);

/* Delta (FRAMES.md) of `size` elements of 1, 2, 4 or 8 bytes, in chunks of 65536; `table` [chunks, 2] int32 = changed elements and
 * gap bytes, `masks` [chunks, 2048] uint32 = a bit per element. Without `starts` fills these two; with `starts` [chunks, 2] (where a
 * chunk's values and gap bytes begin) writes values and gaps from them. */
int rl_cuda_delta_encode(const void* fresh, const void* base, int64_t size, int64_t item_bytes, uint32_t* masks,
                         int32_t* table, const int64_t* starts, uint8_t* gaps, void* values, void* stream);
/* With `bad` only checks, and sets *bad where a chunk does not fit; without, writes. */
int rl_cuda_delta_apply(void* target, int64_t size, int64_t item_bytes, const int32_t* table, const int64_t* starts,
                        const uint8_t* gaps, const void* values, int32_t* bad, void* stream);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
