// A decoder as a Python object: weights are checked once, when it is made, and what changes from call to call at every call.
#include <pybind11/pybind11.h>

#include <vector>

#include "bindings.h"
#include "rl_csrc/decoder.h"
#include "tensor_arg.h"

namespace py = pybind11;

namespace rl {
namespace {

using Handle = py::handle;

template <class T>
T* needed(Handle tensor, const char* name, std::int64_t size) {
  if (tensor.is_none()) raise("ArgumentError", std::string(name) + " is None; wanted a tensor of dtype " + dtype_name(dtype_of<T>()) + ".");
  return elements<T>(tensor, name, size);
}

const float* floats(Handle tensor, const char* name, std::int64_t size) { return needed<float>(tensor, name, size); }

// panels, bias or None, outputs.
rl_packed_linear packed_linear(const py::tuple& packed, const char* name, std::int64_t inputs) {
  rl_packed_linear linear{};
  linear.outputs = packed[2].cast<std::int64_t>();
  linear.inputs = inputs;
  TensorArg panels(packed[0], name);
  panels.shaped({(linear.outputs + RL_PANEL - 1) / RL_PANEL, inputs, RL_PANEL});
  linear.panels = elements<float>(packed[0], name);
  linear.bias = elements<float>(packed[1], name, linear.outputs);
  return linear;
}

void wants_outputs(const rl_packed_linear& linear, std::int64_t outputs, const char* name) {
  if (linear.outputs != outputs)
    raise("ArgumentError", std::string(name) + " gives " + std::to_string(linear.outputs) + " numbers; wanted " + std::to_string(outputs) + ".");
}

class Decoder {
 public:
  // Each layer: input_norm, qkv, query_norm, key_norm, out, post_norm, gate_up, down, window; linear layers as packed_linear has them.
  Decoder(Handle embedding, const py::tuple& layers, Handle norm, const py::tuple& head, Handle cos, Handle sin, std::int64_t heads,
          std::int64_t kv_heads, double eps, double scaling)
      : kept_(py::make_tuple(embedding, layers, norm, head, cos, sin)) {
    TensorArg table(embedding, "embedding"), turns(cos, "cos");
    table.shaped({-1, -1});
    turns.shaped({-1, -1});
    if (kv_heads < 1 || heads < 1 || heads % kv_heads)
      raise("ArgumentError", "num_heads is " + std::to_string(heads) + " and num_kv_heads " + std::to_string(kv_heads) + "; wanted a multiple of it.");
    d_.vocab = table.size(0), d_.hidden = table.size(1), d_.num_positions = turns.size(0), d_.head_size = 2 * turns.size(1);
    d_.heads = heads, d_.kv_heads = kv_heads;
    if (d_.hidden < 1) table.refuse("at least one column");
    if (d_.head_size < 1) turns.refuse("at least one column");
    d_.eps = static_cast<float>(eps), d_.scaling = static_cast<float>(scaling);
    d_.embedding = floats(embedding, "embedding", -1);
    d_.cos = floats(cos, "cos", -1);
    d_.sin = floats(sin, "sin", turns.numel());
    d_.norm = floats(norm, "norm", d_.hidden);
    d_.head = packed_linear(head, "head", d_.hidden);
    for (const Handle layer : layers) layers_.push_back(layer_of(layer.cast<py::tuple>()));
    d_.layers = layers_.data(), d_.num_layers = static_cast<std::int64_t>(layers_.size());
  }

  std::int64_t workspace(std::int64_t tokens, std::int64_t num_logits) const { return rl_cpu_decode_workspace(&d_, tokens, num_logits); }

  void decode(Handle ids, Handle positions, Handle rows, Handle block_tables, const py::sequence& key_caches, const py::sequence& value_caches,
              Handle which, Handle workspace, Handle logits, int threads) const {
    Call call(*this, ids, positions, rows, block_tables, key_caches, value_caches);
    choose(which, call.batch);
    call.run(workspace, logits, [&] { return rl_cpu_decode(&d_, &call.batch, threads); });
  }

  // `drawing` is temperature, streams, is_greedy or None, limits, stop_ids, interrupt or None; `drawn` ids, logprobs, counts.
  void generate(Handle ids, Handle positions, Handle rows, Handle block_tables, const py::sequence& key_caches,
                const py::sequence& value_caches, const py::tuple& drawing, std::int64_t steps, Handle workspace, Handle logits,
                const py::tuple& drawn, int threads) const {
    Call call(*this, ids, positions, rows, block_tables, key_caches, value_caches);
    const std::int64_t size = call.batch.num_logits = call.batch.tokens;
    wants_outputs(d_.head, d_.vocab, "head");  // what is drawn is fed
    TensorArg stops(drawing[4], "stop_ids");
    stops.shaped({size, -1});
    rl_generation g{};
    g.temperature = floats(drawing[0], "temperature", size);
    g.streams = needed<std::int64_t>(drawing[1], "streams", size);
    g.is_greedy = elements<std::uint8_t>(drawing[2], "is_greedy", size);
    g.limits = needed<std::int64_t>(drawing[3], "limits", size);
    g.stop_ids = needed<std::int64_t>(drawing[4], "stop_ids", -1), g.num_stops = stops.size(1);
    g.interrupt = elements<std::int64_t>(drawing[5], "interrupt", 1);
    g.steps = steps;
    g.ids = needed<std::int64_t>(drawn[0], "ids", size * steps);
    g.logprobs = needed<float>(drawn[1], "logprobs", size * steps);
    g.counts = needed<std::int64_t>(drawn[2], "counts", size);
    for (std::int64_t i = 0; i < size; ++i)
      if (g.limits[i] > d_.num_positions)
        raise("ArgumentError", "limits[" + std::to_string(i) + "] is " + std::to_string(g.limits[i]) + "; allowed are up to " +
                                   std::to_string(d_.num_positions) + ".");
    call.run(workspace, logits, [&] { return rl_cpu_generate(&d_, &call.batch, &g, threads); });
  }

 private:
  // What decode and generate share: new tokens over pages.
  struct Call {
    Call(const Decoder& decoder, Handle ids, Handle positions, Handle rows, Handle block_tables, const py::sequence& key_caches,
         const py::sequence& value_caches)
        : of(decoder), tables(block_tables, "block_tables"), kept(py::make_tuple(py::tuple(key_caches), py::tuple(value_caches))) {
      TensorArg tokens(ids, "ids");
      tokens.shaped({-1});
      tables.shaped({-1, -1});
      batch.tokens = tokens.size(0);
      batch.ids = elements<std::int64_t>(ids, "ids", batch.tokens);
      batch.positions = elements<std::int64_t>(positions, "positions", batch.tokens);
      batch.rows = elements<std::int64_t>(rows, "rows", batch.tokens);
      batch.block_tables = elements<std::int64_t>(block_tables, "block_tables");
      batch.table_rows = tables.size(0), batch.table_stride = tables.size(1);
      keys = of.caches(kept[0], "a key cache", batch), values = of.caches(kept[1], "a value cache", batch);
      batch.key_caches = keys.data(), batch.value_caches = values.data();
    }

    template <class Work>
    void run(Handle workspace, Handle logits, const Work& work) {
      batch.workspace = elements<float>(workspace, "workspace", of.workspace(batch.tokens, batch.num_logits));
      batch.logits = elements<float>(logits, "logits", batch.num_logits * ((of.d_.head.outputs + RL_PANEL - 1) / RL_PANEL) * RL_PANEL);
      std::int64_t bad = 0;
      {
        py::gil_scoped_release released;
        bad = work();
      }
      if (bad) of.refuse(batch, bad - 1, tables);
    }

    const Decoder& of;
    TensorArg tables;
    py::tuple kept;  // whoever lets go of the caches during the call, in a list that two threads share
    rl_decoder_batch batch{};
    std::vector<float*> keys, values;
  };

  rl_decoder_layer layer_of(const py::tuple& t) const {
    const std::int64_t attended = d_.heads * d_.head_size;
    rl_decoder_layer layer{};
    layer.input_norm = floats(t[0], "input_norm", d_.hidden);
    layer.qkv = packed_linear(t[1], "qkv", d_.hidden);
    layer.query_norm = elements<float>(t[2], "query_norm", d_.head_size);
    layer.key_norm = elements<float>(t[3], "key_norm", d_.head_size);
    layer.out = packed_linear(t[4], "out", attended);
    layer.post_norm = floats(t[5], "post_norm", d_.hidden);
    layer.gate_up = packed_linear(t[6], "gate_up", d_.hidden);
    if (layer.gate_up.outputs < 2) raise("ArgumentError", "gate_up gives " + std::to_string(layer.gate_up.outputs) + " numbers; wanted at least 2.");
    layer.down = packed_linear(t[7], "down", layer.gate_up.outputs / 2);
    layer.window = t[8].cast<std::int64_t>();
    wants_outputs(layer.qkv, attended + 2 * d_.kv_heads * d_.head_size, "qkv");
    wants_outputs(layer.out, d_.hidden, "out");
    wants_outputs(layer.gate_up, 2 * layer.down.inputs, "gate_up");
    wants_outputs(layer.down, d_.hidden, "down");
    return layer;
  }

  void choose(Handle which, rl_decoder_batch& b) const {
    b.num_logits = b.tokens;
    if (which.is_none()) return;
    TensorArg chosen(which, "which");
    chosen.shaped({-1});
    b.num_logits = chosen.size(0);
    b.which = elements<std::int64_t>(which, "which", b.num_logits);
    for (std::int64_t i = 0; i < b.num_logits; ++i)
      if (b.which[i] < 0 || b.which[i] >= b.tokens)
        raise("ArgumentError", "which[" + std::to_string(i) + "] is " + std::to_string(b.which[i]) + "; allowed are 0 to " +
                                   std::to_string(b.tokens - 1) + ".");
  }

  std::vector<float*> caches(const py::tuple& tensors, const char* name, rl_decoder_batch& b) const {
    if (static_cast<std::int64_t>(tensors.size()) != d_.num_layers)
      raise("ArgumentError", std::to_string(tensors.size()) + " caches for " + std::to_string(d_.num_layers) + " layers; wanted as many.");
    std::vector<float*> found;
    for (const Handle tensor : tensors) {
      TensorArg cache(tensor, name);
      cache.shaped({b.page_size ? b.pages : -1, b.page_size ? b.page_size : -1, d_.kv_heads, d_.head_size});
      b.pages = cache.size(0), b.page_size = cache.size(1);
      if (b.page_size < 1) cache.refuse("pages of at least one position");
      found.push_back(elements<float>(tensor, name));
    }
    return found;
  }

  [[noreturn]] void refuse(const rl_decoder_batch& b, std::int64_t t, const TensorArg& tables) const {
    const auto out_of = [&](const char* name, std::int64_t value, std::int64_t size) {
      if (value < 0 || value >= size)
        raise("ArgumentError", std::string(name) + "[" + std::to_string(t) + "] is " + std::to_string(value) + "; allowed are 0 to " +
                                   std::to_string(size - 1) + ".");
    };
    out_of("ids", b.ids[t], d_.vocab);
    out_of("positions", b.positions[t], d_.num_positions);
    tables.refuse("a page of the caches for every position that token " + std::to_string(t) + " looks at (row " + std::to_string(b.rows[t]) +
                  ", position " + std::to_string(b.positions[t]) + "), or those that follow it within the call");
  }

  py::tuple kept_;  // tensors whose memory is read
  rl_decoder d_{};
  std::vector<rl_decoder_layer> layers_;
};

void pack_linear(Handle weight, Handle panels, int threads) {
  TensorArg from(weight, "weight"), to(panels, "panels");
  from.on_cpu().shaped({-1, -1});
  const std::int64_t outputs = from.size(0), inputs = from.size(1);
  to.shaped({(outputs + RL_PANEL - 1) / RL_PANEL, inputs, RL_PANEL});
  const float* source = elements<float>(weight, "weight");
  float* target = elements<float>(panels, "panels");
  py::gil_scoped_release released;
  rl_cpu_pack_linear(source, inputs, outputs, inputs, target, threads);
}

}  // namespace

void bind_decoder(py::module_& m) {
  m.attr("panel") = RL_PANEL;
  m.def("pack_linear", &pack_linear);
  py::class_<Decoder>(m, "Decoder")
      .def(py::init<Handle, const py::tuple&, Handle, const py::tuple&, Handle, Handle, std::int64_t, std::int64_t, double, double>())
      .def("workspace", &Decoder::workspace)
      .def("decode", &Decoder::decode)
      .def("generate", &Decoder::generate);
}

}  // namespace rl
