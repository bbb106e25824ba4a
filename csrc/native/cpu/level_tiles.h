// The LM head on tiles, whatever multiplies them: included by tiles_amx.cpp and tiles_bf16.cpp, which define `Unit` (readies the
// machine for products while it lives) and `multiply` for the instructions they are compiled for.
//
// Vocabulary rows are the left operand, hidden states the right one, packed once. A product's lanes are then tokens, so the
// softmax over the vocabulary runs down its rows without any reduction across lanes, and a token's bits do not depend on its
// neighbours. Nothing here may come from a std template (see level.h).

struct Head {  // what turns a raw product into a scaled logit
  const float* bias;
  float softcap, inverse_softcap;
};

template <bool kPlain>
RL_INLINE vf scaled(vf raw, vf factor, const Head& h, int64_t row, vf* cap) {
  if (kPlain) return max_keeping_nan(splat(kFloor), raw * factor);
  if (h.bias) raw += splat(h.bias[row]);
  if (h.softcap == 0) return max_keeping_nan(splat(kFloor), raw * factor);
  *cap = tanhv(raw * splat(h.inverse_softcap));
  return splat(h.softcap) * *cap * factor;
}

template <bool kPlain, bool kDot, bool kSquare, bool kKeep>
RL_INLINE void add_stats(float* scores, int rows, int64_t first, int64_t token, const TileWork& w, const Head& h, const TileStats& s) {
  const vf factor = load(w.factor + token);
  const vf old_top = load(s.top + token);
  vf top0 = old_top, top1 = old_top, unused{};
  for (int r = 0; r < rows; r += 2) {
    const vf z0 = scaled<kPlain>(load(scores + r * 32), factor, h, first + r, &unused);
    store(scores + r * 32, z0);
    top0 = max_keeping_nan(top0, z0);
    if (r + 1 == rows) break;
    const vf z1 = scaled<kPlain>(load(scores + r * 32 + 32), factor, h, first + r + 1, &unused);
    store(scores + r * 32 + 32, z1);
    top1 = max_keeping_nan(top1, z1);
  }
  const vf top = max_keeping_nan(top0, top1);
  uint16_t* kept = kKeep ? s.kept + first * s.stride + token : nullptr;
  if (kKeep) store(s.kept_top + first / kPanelRows * s.stride + token, top);
  vf sum0{}, sum1{}, dot0{}, dot1{}, square0{}, square1{};
  for (int r = 0; r < rows; r += 2) {
    const vf t0 = load(scores + r * 32) - top, e0 = exp2v(t0);
    sum0 += e0;
    if (kKeep) narrow(kept + r * s.stride, e0);
    if (kDot) dot0 = fma(e0, t0, dot0);
    if (kSquare) square0 = fma(e0, e0, square0);
    if (r + 1 == rows) break;
    const vf t1 = load(scores + r * 32 + 32) - top, e1 = exp2v(t1);
    sum1 += e1;
    if (kKeep) narrow(kept + (r + 1) * s.stride, e1);
    if (kDot) dot1 = fma(e1, t1, dot1);
    if (kSquare) square1 = fma(e1, e1, square1);
  }
  const vf shift = old_top - top, scale = exp2v(shift), old_sum = load(s.sum + token);
  store(s.top + token, top);
  store(s.sum + token, fma(old_sum, scale, sum0 + sum1));
  if (kDot) store(s.dot + token, fma(scale, fma(shift, old_sum, load(s.dot + token)), dot0 + dot1));
  if (kSquare) store(s.square + token, fma(load(s.square + token), scale * scale, square0 + square1));
  for (int j = 0; j < kLanes; ++j) {
    const int64_t r = w.label[token + j] - first;
    if (r >= 0 && r < rows) s.target[token + j] = scores[r * 32 + j];
  }
}

template <bool kPlain>
RL_INLINE void put_gradient(const float* scores, int rows, int64_t first, int64_t token, const TileWork& w, const Head& h,
                            const TileGradient& g) {
  const vf factor = load(w.factor + token), lse2 = load(g.lse2 + token), a = load(g.a + token), b = load(g.b + token);
  const vi label = *reinterpret_cast<const vi*>(w.label + token);
  const vf at_target = load(g.at_target + token);
  const bool capped = !kPlain && h.softcap != 0;
  uint16_t* out = g.out + (first - w.first) * g.stride + token;
  for (int r = 0; r < rows; ++r) {
    vf cap{};
    const vf t = scaled<kPlain>(load(scores + r * 32), factor, h, first + r, &cap) - lse2;
    vf d = exp2v(t) * fma(b, t, a);
    d = label == splat_int((int32_t)(first + r)) ? at_target : d;
    if (capped) d = d * (1.0f - cap * cap);
    narrow(out + r * g.stride, d);
  }
}

// Copies weight rows [first, first + 32) tile by tile: rows whose distance is a power of two share a cache set, and tiles read
// straight from them would be fetched again for every pair of token tiles. Rows behind the last are copies of the first.
RL_INLINE void pack_panel(const TileWork& w, int64_t first, int rows, uint16_t* panel) {
  const int64_t steps = w.width / kTileWidth;
  for (int r = 0; r < kPanelRows; ++r) {
    const uint16_t* row = w.weight + (first + (r < rows ? r : 0)) * w.weight_stride;
    uint16_t* out = panel + r * kTileWidth;
    for (int64_t k = 0; k < steps; ++k) _mm512_storeu_si512(out + k * kPanelRows * kTileWidth, _mm512_loadu_si512(row + k * kTileWidth));
  }
}

RL_INLINE void prefetch_share(const TileWork& w, int64_t first, int64_t part, int64_t parts) {
  const int64_t lines = w.width / 32, total = lines * kPanelRows;
  const int64_t end = total * (part + 1) / parts;
  for (int64_t i = total * part / parts; i < end; ++i) {
    const int64_t row = first + i / lines;
    if (row >= w.last) return;
    _mm_prefetch((const char*)(w.weight + row * w.weight_stride + i % lines * 32), _MM_HINT_T1);
  }
}

template <class Epilogue>
RL_INLINE void run(const TileWork& w, const Epilogue& epilogue) {
  const Unit unit;
  alignas(64) float scores[2][kPanelRows * 32];
  void* const room = __builtin_malloc((size_t)(kPanelRows * w.width * 2 + 64));
  uint16_t* const panel = (uint16_t*)(((uintptr_t)room + 63) & ~(uintptr_t)63);
  const int64_t steps = w.width / kTileWidth, pairs = w.tokens / kPairTokens;
  int turn = 0;
  for (int64_t first = w.first; first < w.last; first += kPanelRows) {
    const int rows = (int)(w.last - first < kPanelRows ? w.last - first : kPanelRows);
    pack_panel(w, first, rows, panel);
    for (int64_t p = 0; p < pairs; ++p, turn ^= 1) {
      prefetch_share(w, first + kPanelRows, p, pairs);
      multiply(panel, w.packed + p * kPairTokens * w.width, steps, scores[turn]);
      epilogue(scores[turn], rows, first, p * kPairTokens);
      epilogue(scores[turn] + 16, rows, first, p * kPairTokens + 16);
    }
  }
  __builtin_free(room);
}

Head head_of(const TileWork& w) { return {w.bias, w.softcap, w.softcap != 0 ? 1.0f / w.softcap : 0.0f}; }

template <bool kPlain, bool kDot, bool kSquare, bool kKeep>
void stats_run(const TileWork& w, const TileStats& s) {
  const Head h = head_of(w);
  run(w, [&](float* scores, int rows, int64_t first, int64_t token) { add_stats<kPlain, kDot, kSquare, kKeep>(scores, rows, first, token, w, h, s); });
}

template <bool kPlain>
void gradient_run(const TileWork& w, const TileGradient& g) {
  const Head h = head_of(w);
  run(w, [&](float* scores, int rows, int64_t first, int64_t token) { put_gradient<kPlain>(scores, rows, first, token, w, h, g); });
}

void linear_stats(const TileWork& w, const TileStats& s) {
  const bool plain = !w.bias && w.softcap == 0;
  if (s.kept) return s.wants_dot ? stats_run<true, true, false, true>(w, s) : stats_run<true, false, false, true>(w, s);
  if (s.wants_square) return plain ? stats_run<true, true, true, false>(w, s) : stats_run<false, true, true, false>(w, s);
  if (plain) return s.wants_dot ? stats_run<true, true, false, false>(w, s) : stats_run<true, false, false, false>(w, s);
  s.wants_dot ? stats_run<false, true, false, false>(w, s) : stats_run<false, false, false, false>(w, s);
}

void linear_gradient(const TileWork& w, const TileGradient& g) {
  !w.bias && w.softcap == 0 ? gradient_run<true>(w, g) : gradient_run<false>(w, g);
}

void linear_rescale(const TileWork& w, const TileGradient& g, const float* kept_top) {
  for (int64_t first = w.first; first < w.last; first += kPanelRows) {
    const int rows = (int)(w.last - first < kPanelRows ? w.last - first : kPanelRows);
    for (int64_t token = 0; token < w.tokens; token += kLanes) {
      const vf shift = load(kept_top + first / kPanelRows * g.stride + token) - load(g.lse2 + token);
      const vf factor = load(g.a + token) * exp2v(shift), at_target = load(g.at_target + token);
      const vi label = *reinterpret_cast<const vi*>(w.label + token);
      uint16_t* p = g.out + first * g.stride + token;
      for (int r = 0; r < rows; ++r, p += g.stride) {
        const vf d = widen(p) * factor;
        narrow(p, label == splat_int((int32_t)(first + r)) ? at_target : d);
      }
    }
  }
}
