// Attention over a paged cache of keys and values: new ones are written, then every token looks back over its pages.
#include <algorithm>
#include <cstring>
#include <vector>

#include "bindings.h"
#include "cpu/attention.h"
#include "cpu/pool.h"
#include "isa.h"
#include "tensor_arg.h"

namespace rl {
namespace {

using PagedToken = void (*)(const rl_paged_attention*, std::int64_t, float*, std::int64_t*);

PagedToken paged_token() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return paged_token_avx512;
  if (isa() == Isa::avx2) return paged_token_avx2;
#endif
  return paged_token_baseline;
}

std::int64_t slot_of(const rl_paged_attention& in, std::int64_t token) {
  const std::int64_t position = in.positions[token];
  return in.block_tables[in.rows[token] * in.table_stride + position / in.page_size] * in.page_size + position % in.page_size;
}

bool is_placed(const rl_paged_attention& in, std::int64_t token, std::int64_t last) {
  const std::int64_t row = in.rows[token], position = in.positions[token];
  if (row < 0 || row >= in.table_rows || position < 0 || last / in.page_size >= in.table_stride) return false;
  const std::int64_t* pages = in.block_tables + row * in.table_stride;
  const std::int64_t first = in.window > 0 ? std::max<std::int64_t>(0, position + 1 - in.window) / in.page_size : 0;
  return std::all_of(pages + first, pages + last / in.page_size + 1,
                     [&](std::int64_t page) { return page >= 0 && page < in.pages; });
}

void write_heads(const void* source, const std::int64_t* strides, void* cache, std::int64_t heads, std::int64_t size, std::int64_t width,
                 std::int64_t token, std::int64_t slot) {
  for (std::int64_t head = 0; head < heads; ++head)
    std::memcpy(static_cast<char*>(cache) + (slot * heads + head) * size * width,
                static_cast<const char*>(source) + (token * strides[0] + head * strides[1]) * width,
                static_cast<std::size_t>(size * width));
}

}  // namespace

std::int64_t first_unplaced(const rl_paged_attention& in, const std::int64_t* last) {
  for (std::int64_t t = 0; t < in.tokens; ++t)
    if (!is_placed(in, t, last[t])) return t + 1;
  return 0;
}

void attend_pages(const rl_paged_attention& in, int threads) {
  const std::int64_t width = in.dtype == RL_F32 ? 4 : 2;
  std::int64_t longest = 0, work = 0;
  for (std::int64_t t = 0; t < in.tokens; ++t) {
    const std::int64_t slot = slot_of(in, t);
    write_heads(in.key, in.key_strides, in.key_cache, in.kv_heads, in.key_size, width, t, slot);
    write_heads(in.value, in.value_strides, in.value_cache, in.kv_heads, in.value_size, width, t, slot);
    longest = std::max(longest, in.positions[t] + 1);
    work += in.positions[t] + 1;
  }
  constexpr std::int64_t kPieceProducts = 1 << 16;
  const std::int64_t per_token = work / std::max<std::int64_t>(in.tokens, 1) * in.heads * (in.key_size + in.value_size);
  const std::int64_t grain = std::max<std::int64_t>(1, kPieceProducts / std::max<std::int64_t>(per_token, 1));
  const std::int64_t padded = longest + kPagedBlock - 1;
  const PagedToken attend = paged_token();
  parallel_for(in.tokens, grain, threads, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scratch(static_cast<std::size_t>(in.heads * (in.key_size + padded)));
    std::vector<std::int64_t> slots(static_cast<std::size_t>(padded));
    for (std::int64_t t = begin; t < end; ++t) attend(&in, t, scratch.data(), slots.data());
  });
}

}  // namespace rl

extern "C" std::int64_t rl_cpu_paged_attention(const rl_paged_attention* in, int threads) {
  const std::int64_t bad = rl::first_unplaced(*in, in->positions);
  if (!bad) rl::attend_pages(*in, threads);
  return bad;
}

namespace rl {
namespace {

namespace py = pybind11;

std::int32_t same_type(const TensorArg& arg, const TensorArg& first) {
  const dl::DataType &t = arg.dtype(), &want = first.dtype();
  if (t.code != want.code || t.bits != want.bits) arg.refuse(std::string("the dtype of ") + first.name());
  if (t.code == 2 && t.bits == 32) return RL_F32;
  if (t.code == 2 && t.bits == 16) return RL_F16;
  if (t.code == 4 && t.bits == 16) return RL_BF16;
  arg.refuse("float32, bfloat16 or float16");
}

// [T, heads, size] with adjacent numbers within a head.
const void* token_heads(const TensorArg& arg, std::int64_t* strides) {
  if (arg.stride(2) != 1 && arg.size(2) > 1) arg.refuse("adjacent numbers within a head");
  strides[0] = arg.stride(0), strides[1] = arg.stride(1);
  return arg.data();
}

void paged_attention(py::handle query, py::handle key, py::handle value, py::handle key_cache, py::handle value_cache,
                     py::handle block_tables, py::handle rows, py::handle positions, double scaling, std::int64_t window,
                     double softcap, py::handle sinks, py::handle out, int threads) {
  TensorArg q(query, "query"), k(key, "key"), v(value, "value"), keys(key_cache, "key_cache"), values(value_cache, "value_cache");
  TensorArg tables(block_tables, "block_tables"), result(out, "out");
  q.on_cpu().shaped({-1, -1, -1});
  keys.on_cpu().shaped({-1, -1, -1, q.size(2)}).dense();
  values.on_cpu().shaped({keys.size(0), keys.size(1), keys.size(2), -1}).dense();
  k.on_cpu().shaped({q.size(0), keys.size(2), q.size(2)});
  v.on_cpu().shaped({q.size(0), keys.size(2), values.size(3)});
  tables.on_cpu().shaped({-1, -1}).dense();
  result.on_cpu().shaped({q.size(0), q.size(1), values.size(3)}).dense();
  if (keys.size(1) < 1) keys.refuse("pages of at least one position");
  if (keys.size(2) == 0 || q.size(1) % keys.size(2) != 0) q.refuse("a multiple of the cache's " + std::to_string(keys.size(2)) + " heads");
  rl_paged_attention in{};
  in.dtype = same_type(q, q);
  for (const TensorArg* arg : {&k, &v, &keys, &values, &result}) same_type(*arg, q);
  in.query = token_heads(q, in.query_strides);
  in.key = token_heads(k, in.key_strides);
  in.value = token_heads(v, in.value_strides);
  in.key_cache = keys.data(), in.value_cache = values.data(), in.out = result.data(), in.out_stride = result.size(1) * result.size(2);
  in.tokens = q.size(0), in.heads = q.size(1), in.key_size = q.size(2);
  in.pages = keys.size(0), in.page_size = keys.size(1), in.kv_heads = keys.size(2), in.value_size = values.size(3);
  in.table_rows = tables.size(0), in.table_stride = tables.size(1);
  in.block_tables = elements<std::int64_t>(block_tables, "block_tables");
  in.rows = elements<std::int64_t>(rows, "rows", in.tokens);
  in.positions = elements<std::int64_t>(positions, "positions", in.tokens);
  in.sinks = elements<float>(sinks, "sinks", in.heads);
  in.scaling = static_cast<float>(scaling), in.softcap = static_cast<float>(softcap), in.window = window;
  std::int64_t bad = 0;
  {
    py::gil_scoped_release released;
    bad = rl_cpu_paged_attention(&in, threads);
  }
  if (bad)
    tables.refuse("a page of the cache for every position that token " + std::to_string(bad - 1) + " looks at (row " +
                  std::to_string(in.rows[bad - 1]) + ", position " + std::to_string(in.positions[bad - 1]) + ")");
}

}  // namespace

void bind_attention(py::module_& m) { m.def("paged_attention", &paged_attention); }

}  // namespace rl
