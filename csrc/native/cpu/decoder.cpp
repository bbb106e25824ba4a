// The pass of a decoder: norms, projections, rotation, attention over pages, gated MLP, head; and generation, which repeats it.
#include "rl_csrc/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "cpu/attention.h"
#include "cpu/decoder.h"
#include "cpu/pool.h"
#include "isa.h"
#include "rl_csrc/kernels.h"

namespace rl {
namespace {

const DecoderLevel& decoder_level() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return decoder_avx512();
  if (isa() == Isa::avx2) return decoder_avx2();
#endif
  return decoder_baseline();
}

std::int64_t panels_of(std::int64_t outputs) { return (outputs + RL_PANEL - 1) / RL_PANEL; }

// Numbers from one row of a workspace to the next: whole panels, and not a power of two, for rows that are read together would
// then all want the same lines of a cache.
std::int64_t stride_of(std::int64_t width) { return panels_of(width) * RL_PANEL + 16; }

struct Widths {
  std::int64_t hidden, narrow, wide;

  explicit Widths(const rl_decoder& d) : hidden(stride_of(d.hidden)), narrow(stride_of(std::max(d.hidden, d.heads * d.head_size))), wide(0) {
    for (std::int64_t i = 0; i < d.num_layers; ++i)
      wide = std::max({wide, stride_of(d.layers[i].qkv.outputs), stride_of(d.layers[i].gate_up.outputs)});
  }
};

// The attention of a batch but for a layer's own: queries, caches, window.
rl_paged_attention pages_of(const rl_decoder& d, const rl_decoder_batch& b) {
  rl_paged_attention in{};
  in.block_tables = b.block_tables, in.rows = b.rows, in.positions = b.positions;
  in.tokens = b.tokens, in.heads = d.heads, in.kv_heads = d.kv_heads, in.key_size = in.value_size = d.head_size;
  in.pages = b.pages, in.page_size = b.page_size, in.table_rows = b.table_rows, in.table_stride = b.table_stride;
  in.scaling = d.scaling, in.dtype = RL_F32;
  return in;
}

// The tokens of one call, or some of them that do not look at one another.
class Pass {
 public:
  Pass(const rl_decoder& decoder, const rl_decoder_batch& batch, float* workspace, int threads)
      : d_(decoder), b_(batch), widths_(decoder), threads_(threads), x_(workspace), narrow_(x_ + batch.tokens * widths_.hidden),
        wide_(narrow_ + std::max(batch.tokens, batch.num_logits) * widths_.narrow) {}

  void run() {
    each(b_.tokens, d_.hidden, [&](std::int64_t t) {
      std::memcpy(x_ + t * widths_.hidden, d_.embedding + b_.ids[t] * d_.hidden, static_cast<std::size_t>(d_.hidden) * sizeof(float));
    });
    for (std::int64_t i = 0; i < d_.num_layers; ++i) layer(i);
    each(b_.num_logits, d_.hidden, [&](std::int64_t i) { norm(b_.which ? b_.which[i] : i, i, d_.norm); });
    linear(d_.head, narrow_, widths_.narrow, b_.num_logits, b_.logits, panels_of(d_.head.outputs) * RL_PANEL, false);
  }

 private:
  static constexpr std::int64_t kPieceNumbers = 1 << 14, kPieceProducts = 1 << 19;  // below, waking a thread costs more
  static constexpr std::int64_t kResident = 1 << 17, kFewRows = 48;  // numbers of x that stay in cache while panels pass; rows at least

  void layer(std::int64_t i) {
    const rl_decoder_layer& layer = d_.layers[i];
    norm_all(layer.input_norm);
    linear(layer.qkv, narrow_, widths_.narrow, b_.tokens, wide_, widths_.wide, false);
    each(b_.tokens, layer.qkv.outputs, [&](std::int64_t t) { rotate(layer, t); });
    attend(layer, i);
    linear(layer.out, narrow_, widths_.narrow, b_.tokens, x_, widths_.hidden, true);
    norm_all(layer.post_norm);
    linear(layer.gate_up, narrow_, widths_.narrow, b_.tokens, wide_, widths_.wide, false);
    each(b_.tokens, layer.gate_up.outputs, [&](std::int64_t t) { level_.gate(wide_ + t * widths_.wide, layer.down.inputs); });
    linear(layer.down, wide_, widths_.wide, b_.tokens, x_, widths_.hidden, true);
  }

  template <class Body>
  void each(std::int64_t rows, std::int64_t width, const Body& body) {
    parallel_for(rows, kPieceNumbers / width, threads_, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) body(t);
    });
  }

  void norm(std::int64_t from, std::int64_t to, const float* scales) {
    level_.norm(x_ + from * widths_.hidden, scales, d_.hidden, d_.eps, narrow_ + to * widths_.narrow);
  }

  void norm_all(const float* scales) {
    each(b_.tokens, d_.hidden, [&](std::int64_t t) { norm(t, t, scales); });
  }

  void linear(const rl_packed_linear& linear, const float* x, std::int64_t x_stride, std::int64_t rows, float* out, std::int64_t out_stride,
              bool adds) {
    const std::int64_t panels = panels_of(linear.outputs), block = std::max(kFewRows, kResident / linear.inputs);
    const std::int64_t blocks = (rows + block - 1) / block, per_panel = std::min(block, rows) * linear.inputs * RL_PANEL;
    parallel_for(blocks * panels, kPieceProducts / std::max<std::int64_t>(per_panel, 1), threads_, [&](std::int64_t begin, std::int64_t end) {
      while (begin < end) {
        const std::int64_t row = begin / panels * block, first = begin % panels, last = std::min(panels, first + end - begin);
        const LinearWork work{&linear, x + row * x_stride,     x_stride,   std::min(block, rows - row), first,
                              last,    out + row * out_stride, out_stride, adds};
        level_.linear(&work);
        begin += last - first;
      }
    });
  }

  void rotate(const rl_decoder_layer& layer, std::int64_t token) {
    const std::int64_t half = d_.head_size / 2, at = b_.positions[token] * half;
    float* head = wide_ + token * widths_.wide;
    for (std::int64_t n = 0; n < d_.heads + d_.kv_heads; ++n, head += d_.head_size) {
      const float* scales = n < d_.heads ? layer.query_norm : layer.key_norm;
      if (scales) level_.norm(head, scales, d_.head_size, d_.eps, head);
      level_.rotate(head, d_.cos + at, d_.sin + at, half);
    }
  }

  void attend(const rl_decoder_layer& layer, std::int64_t i) {
    rl_paged_attention in = pages_of(d_, b_);
    in.query = wide_, in.key = wide_ + d_.heads * d_.head_size, in.value = wide_ + (d_.heads + d_.kv_heads) * d_.head_size;
    for (std::int64_t* strides : {in.query_strides, in.key_strides, in.value_strides}) strides[0] = widths_.wide, strides[1] = d_.head_size;
    in.key_cache = b_.key_caches[i], in.value_cache = b_.value_caches[i];
    in.out = narrow_, in.out_stride = widths_.narrow;
    in.window = layer.window;
    attend_pages(in, threads_);
  }

  const rl_decoder& d_;
  const rl_decoder_batch& b_;
  const Widths widths_;
  const int threads_;
  const DecoderLevel& level_ = decoder_level();
  float *x_, *narrow_, *wide_;
};

// `last` [tokens]: the last position of each token's sequence that the call computes.
std::int64_t first_bad_token(const rl_decoder& d, const rl_decoder_batch& b, const std::int64_t* last) {
  for (std::int64_t t = 0; t < b.tokens; ++t)
    if (b.ids[t] < 0 || b.ids[t] >= d.vocab || b.positions[t] < 0 || last[t] >= d.num_positions) return t + 1;
  rl_paged_attention in = pages_of(d, b);
  for (std::int64_t i = 0; i < d.num_layers; ++i) {  // the widest window tells for all
    if (d.layers[i].window == 0) {
      in.window = 0;
      break;
    }
    in.window = std::max(in.window, d.layers[i].window);
  }
  return first_unplaced(in, last);
}

// Whether no token looks at what another one of the call writes.
bool are_apart(const rl_decoder_batch& b, const std::int64_t* last) {
  std::vector<std::int64_t> writer(static_cast<std::size_t>(b.pages), -1);
  const auto page = [&](std::int64_t t, std::int64_t p) { return b.block_tables[b.rows[t] * b.table_stride + p]; };
  for (std::int64_t t = 0; t < b.tokens; ++t)
    for (std::int64_t p = b.positions[t] / b.page_size; p <= last[t] / b.page_size; ++p) {
      std::int64_t& its = writer[static_cast<std::size_t>(page(t, p))];
      if (its >= 0) return false;
      its = t;
    }
  for (std::int64_t t = 0; t < b.tokens; ++t)
    for (std::int64_t p = 0; p < b.positions[t] / b.page_size; ++p) {
      const std::int64_t seen = page(t, p);
      if (seen >= 0 && seen < b.pages && writer[static_cast<std::size_t>(seen)] >= 0) return false;
    }
  return true;
}

std::int64_t weights_of(const rl_decoder& d) {
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < d.num_layers; ++i)
    for (const rl_packed_linear* l : {&d.layers[i].qkv, &d.layers[i].out, &d.layers[i].gate_up, &d.layers[i].down}) total += l->outputs * l->inputs;
  return total + d.head.outputs * d.head.inputs;
}

// Tokens [begin, end) of a batch whose logits are all wanted, with their share of its workspace.
rl_decoder_batch part_of(const rl_decoder& d, const rl_decoder_batch& b, std::int64_t begin, std::int64_t end) {
  rl_decoder_batch part = b;
  part.ids += begin, part.positions += begin, part.rows += begin;
  part.workspace += rl_cpu_decode_workspace(&d, begin, begin);
  part.logits += begin * panels_of(d.head.outputs) * RL_PANEL;
  part.tokens = part.num_logits = end - begin;
  return part;
}

constexpr std::int64_t kCachedWeights = 1 << 24;   // numbers; beyond, threads had better not all read all of them
constexpr std::int64_t kRowsOfThread = 8;          // fewer rows do not fill a tile
constexpr std::int64_t kSharedProducts = 1 << 22;  // that must lie between two meetings of threads for a second one to be worth waking

// Threads that share out each product of a call in turn.
int threads_of_products(const rl_decoder& d, const rl_decoder_batch& b, int threads) {
  return b.tokens * weights_of(d) / (4 * d.num_layers + 1) < kSharedProducts ? 1 : threads;
}

// Whether threads take tokens from end to end, so that none waits for another; all of them read all weights.
bool goes_by_rows(const rl_decoder& d, const rl_decoder_batch& b, const std::int64_t* last, std::int64_t steps, int threads) {
  const std::int64_t weights = weights_of(d);
  return threads > 1 && !b.which && b.tokens >= 2 * kRowsOfThread && weights <= kCachedWeights &&
         b.tokens * weights * steps >= 2 * kSharedProducts && are_apart(b, last);
}

// Calls body(part, first token of it, threads) with the tokens of a batch by parts whose tokens do not look at one another, or with all.
template <class Body>
void for_parts(const rl_decoder& d, const rl_decoder_batch& b, const std::int64_t* last, std::int64_t steps, int threads, const Body& body) {
  if (!goes_by_rows(d, b, last, steps, threads)) return body(b, 0, threads);
  const std::int64_t grain = std::max(kRowsOfThread, (b.tokens + threads - 1) / threads);
  parallel_for(b.tokens, grain, threads, [&](std::int64_t begin, std::int64_t end) { body(part_of(d, b, begin, end), begin, 1); });
}

// Rows of a batch that go on, side by side.
struct Live {
  std::vector<std::int64_t> row, id, table_row, position, stream;
  std::vector<float> temperature;
  std::vector<std::uint8_t> is_greedy;

  Live(const rl_decoder_batch& b, const rl_generation& g, std::int64_t first)
      : row(static_cast<std::size_t>(b.tokens)), id(b.ids, b.ids + b.tokens), table_row(b.rows, b.rows + b.tokens),
        position(b.positions, b.positions + b.tokens), stream(g.streams + first, g.streams + first + b.tokens),
        temperature(g.temperature + first, g.temperature + first + b.tokens), is_greedy(static_cast<std::size_t>(b.tokens)) {
    std::iota(row.begin(), row.end(), first);
    if (g.is_greedy) std::copy_n(g.is_greedy + first, b.tokens, is_greedy.begin());
  }

  std::size_t size() const { return row.size(); }

  void move(std::size_t from, std::size_t to) {
    row[to] = row[from], id[to] = id[from], table_row[to] = table_row[from], position[to] = position[from], stream[to] = stream[from];
    temperature[to] = temperature[from], is_greedy[to] = is_greedy[from];
  }
};

bool is_over(const rl_generation& g, std::int64_t row, std::int64_t id, float logprob, std::int64_t length) {
  const std::int64_t* stops = g.stop_ids + row * g.num_stops;
  return length >= g.limits[row] || !std::isfinite(logprob) || std::find(stops, stops + g.num_stops, id) != stops + g.num_stops;
}

// The rows of a part, which begin at `first` of the whole batch, until all have ended.
void generate(const rl_decoder& d, const rl_decoder_batch& part, const rl_generation& g, std::int64_t first, int threads) {
  Live live(part, g, first);
  std::vector<std::int64_t> drawn(live.size());
  std::vector<float> logprobs(live.size());
  rl_decoder_batch now = part;
  now.ids = live.id.data(), now.rows = live.table_row.data(), now.positions = live.position.data();
  rl_logits logits{};
  logits.data = part.logits, logits.row_stride = panels_of(d.head.outputs) * RL_PANEL, logits.vocab = d.head.outputs;
  logits.temperature = live.temperature.data(), logits.dtype = RL_F32;
  const rl_draw draw{live.stream.data(), live.position.data(), live.is_greedy.data(), drawn.data(), logprobs.data()};
  std::size_t size = live.size();
  for (std::int64_t step = 0; step < g.steps && size > 0; ++step) {
    now.tokens = now.num_logits = logits.rows = static_cast<std::int64_t>(size);
    Pass(d, now, part.workspace, threads_of_products(d, now, threads)).run();
    for (std::size_t i = 0; i < size; ++i) ++live.position[i];  // of what is drawn now
    rl_cpu_draw(&logits, &draw, threads);
    std::size_t left = 0;
    for (std::size_t i = 0; i < size; ++i) {
      const std::int64_t row = live.row[i], at = row * g.steps + step;
      g.ids[at] = live.id[i] = drawn[i], g.logprobs[at] = logprobs[i], g.counts[row] = step + 1;
      if (!is_over(g, row, drawn[i], logprobs[i], live.position[i] + 1)) live.move(i, left++);
    }
    size = left;
    if (g.interrupt && __atomic_load_n(g.interrupt, __ATOMIC_RELAXED)) return;
  }
}

}  // namespace
}  // namespace rl

using namespace rl;

extern "C" std::int64_t rl_cpu_packed_size(std::int64_t outputs, std::int64_t inputs) { return panels_of(outputs) * RL_PANEL * inputs; }

extern "C" void rl_cpu_pack_linear(const float* weight, std::int64_t row_stride, std::int64_t outputs, std::int64_t inputs, float* panels,
                                   int threads) {
  constexpr std::int64_t kPiece = 1 << 16;
  parallel_for(panels_of(outputs), kPiece / std::max<std::int64_t>(inputs * RL_PANEL, 1), threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t panel = begin; panel < end; ++panel) {
      float* out = panels + panel * RL_PANEL * inputs;
      const float* first = weight + panel * RL_PANEL * row_stride;
      const std::int64_t rows = std::min<std::int64_t>(RL_PANEL, outputs - panel * RL_PANEL);
      for (std::int64_t k = 0; k < inputs; ++k)
        for (std::int64_t n = 0; n < RL_PANEL; ++n) *out++ = n < rows ? first[n * row_stride + k] : 0.0f;
    }
  });
}

extern "C" std::int64_t rl_cpu_decode_workspace(const rl_decoder* decoder, std::int64_t tokens, std::int64_t num_logits) {
  const Widths widths(*decoder);
  return tokens * (widths.hidden + widths.wide) + std::max(tokens, num_logits) * widths.narrow;
}

extern "C" std::int64_t rl_cpu_decode(const rl_decoder* decoder, const rl_decoder_batch* batch, int threads) {
  const rl_decoder& d = *decoder;
  const rl_decoder_batch& b = *batch;
  if (const std::int64_t bad = first_bad_token(d, b, b.positions)) return bad;
  for_parts(d, b, b.positions, 1, threads, [&](const rl_decoder_batch& part, std::int64_t, int its_threads) {
    Pass(d, part, part.workspace, threads_of_products(d, part, its_threads)).run();
  });
  return 0;
}

extern "C" std::int64_t rl_cpu_generate(const rl_decoder* decoder, const rl_decoder_batch* batch, const rl_generation* generation, int threads) {
  const rl_decoder& d = *decoder;
  const rl_decoder_batch& b = *batch;
  const rl_generation& g = *generation;
  std::vector<std::int64_t> last(b.positions, b.positions + b.tokens);
  for (std::int64_t t = 0; t < b.tokens; ++t)  // what is drawn at the limit is not fed
    last[static_cast<std::size_t>(t)] += std::clamp<std::int64_t>(g.limits[t] - b.positions[t] - 2, 0, g.steps - 1);
  if (const std::int64_t bad = first_bad_token(d, b, last.data())) return bad;
  for_parts(d, b, last.data(), g.steps, threads, [&](const rl_decoder_batch& part, std::int64_t first, int its_threads) {
    generate(d, part, g, first, its_threads);
  });
  return 0;
}
