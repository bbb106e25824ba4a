/* Attention over a paged cache, behind a plain C interface. Sizes and strides in elements; rl_dtype is that of kernels.h. */
#pragma once
#include <stdint.h>

#include "rl_csrc/kernels.h"

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

/* New tokens of sequences whose keys and values lie in pages: cache [pages, page_size, kv_heads, size], and a table of pages
 * per row. heads is a multiple of kv_heads. */
typedef struct {
  const void* query;             /* [tokens, heads, key_size], strides of the first two dimensions beside */
  const void* key;               /* [tokens, kv_heads, key_size] */
  const void* value;             /* [tokens, kv_heads, value_size] */
  int64_t query_strides[2], key_strides[2], value_strides[2];
  void* key_cache;
  void* value_cache;
  const int64_t* block_tables;   /* [table_rows, table_stride] pages of each row, in the order of positions */
  const int64_t* rows;           /* [tokens] */
  const int64_t* positions;      /* [tokens] */
  const float* sinks;            /* [heads] score of a virtual key without value; NULL: none */
  void* out;                     /* [tokens, heads, value_size], tokens out_stride apart */
  int64_t out_stride;
  int64_t tokens, heads, kv_heads, key_size, value_size, pages, page_size, table_rows, table_stride;
  int64_t window;                /* positions a token sees, its own included; 0: all */
  float scaling, softcap;        /* softcap 0: none */
  int32_t dtype;                 /* rl_dtype */
} rl_paged_attention;

/* Writes keys and values, then attends. Returns 0, or 1 + the first token that has no page for a position it looks at; then
 * nothing was written. `threads` is the most threads the call may use. */
int64_t rl_cpu_paged_attention(const rl_paged_attention* in, int threads);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
