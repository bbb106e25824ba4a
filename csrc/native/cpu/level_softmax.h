// One row of logits: its statistics in one read, and its gradient. Included by level.h.

constexpr int64_t kTile = 2048;  // scaled logits held in L1 between finding a tile's maximum and summing its exponentials

struct Scale {
  float factor;  // log2(e) / temperature, after the softcap
  float softcap, inverse_softcap;
};

template <bool kCap>
RL_INLINE vf scaled(vf raw, const Scale& s) {
  if (kCap) return splat(s.softcap * s.factor) * tanhv(raw * splat(s.inverse_softcap));
  return max_keeping_nan(splat(kFloor), raw * splat(s.factor));
}

template <class T>
RL_INLINE vf get_tail(const typename T::storage* p, int64_t n, float filler) {
  vf x = splat(filler);
  for (int64_t i = 0; i < n; ++i) x[i] = T::get_one(p + i);
  return x;
}

// Scale `n` logits into `z`, padded to whole vectors with the floor; returns the maximum per lane.
template <class T, bool kCap>
RL_INLINE vf scale_tile(const typename T::storage* p, int64_t n, const Scale& s, float* z) {
  vf top0 = splat(kFloor), top1 = top0;
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const vf a = scaled<kCap>(T::get(p + i), s), b = scaled<kCap>(T::get(p + i + kLanes), s);
    store(z + i, a);
    store(z + i + kLanes, b);
    top0 = max_keeping_nan(top0, a);
    top1 = max_keeping_nan(top1, b);
  }
  for (; i < n; i += kLanes) {
    const int64_t left = n - i;
    vf a = left >= kLanes ? scaled<kCap>(T::get(p + i), s) : scaled<kCap>(get_tail<T>(p + i, left, 0.0f), s);
    for (int64_t j = left; j < kLanes; ++j) a[j] = kFloor;
    store(z + i, a);
    top0 = max_keeping_nan(top0, a);
  }
  return max_keeping_nan(top0, top1);
}

template <bool kDot, bool kSquare>
RL_INLINE void sum_tile(const float* z, int64_t n, float top, double* sum, double* dot, double* square) {
  vf s0{}, s1{}, d0{}, d1{}, q0{}, q1{};
  const vf centre = splat(top);
  const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
  int64_t i = 0;
  for (; i + 2 * kLanes <= padded; i += 2 * kLanes) {
    const vf t0 = load(z + i) - centre, t1 = load(z + i + kLanes) - centre;
    const vf e0 = exp2v(t0), e1 = exp2v(t1);
    s0 += e0, s1 += e1;
    if (kDot) d0 = fma(e0, t0, d0), d1 = fma(e1, t1, d1);
    if (kSquare) q0 = fma(e0, e0, q0), q1 = fma(e1, e1, q1);
  }
  if (i < padded) {
    const vf t = load(z + i) - centre, e = exp2v(t);
    s0 += e;
    if (kDot) d0 = fma(e, t, d0);
    if (kSquare) q0 = fma(e, e, q0);
  }
  *sum = sum_lanes(s0 + s1);
  *dot = kDot ? sum_lanes(d0 + d1) : 0;
  *square = kSquare ? sum_lanes(q0 + q1) : 0;
}

RL_INLINE double exp2_scalar(double x) { return x < -1000 ? 0.0 : __builtin_exp2(x); }

template <class T, bool kCap, bool kDot, bool kSquare>
void row_stats_of(const rl_logits* in, int64_t row, float inverse_temperature, int64_t label, RowStats* out) {
  const typename T::storage* p = (const typename T::storage*)in->data + row * in->row_stride;
  const Scale s{inverse_temperature * kLog2e, in->softcap, kCap ? 1.0f / in->softcap : 0.0f};
  float z[kTile + kLanes];
  RowStats r{kFloor, -__builtin_inff(), 0, 0, 0};
  for (int64_t begin = 0; begin < in->vocab; begin += kTile) {
    const int64_t n = in->vocab - begin < kTile ? in->vocab - begin : kTile;
    float top = max_lane(scale_tile<T, kCap>(p + begin, n, s, z));
    if (label >= begin && label < begin + n) r.target = z[label - begin];
    top = top > r.top ? top : r.top;
    double sum, dot, square;
    sum_tile<kDot, kSquare>(z, n, top, &sum, &dot, &square);  // from zero: a tile's sum does not see the row's
    const double shift = (double)r.top - (double)top;
    const double factor = shift == 0 ? 1.0 : exp2_scalar(shift);
    if (kDot) r.dot = factor * (r.dot + (factor > 0 ? shift : 0.0) * r.sum) + dot;
    r.sum = r.sum * factor + sum;
    if (kSquare) r.square = r.square * factor * factor + square;
    r.top = top;
  }
  *out = r;
}

template <class T, bool kCap>
void row_stats_typed(const rl_logits* in, int64_t row, float inverse_temperature, int64_t label, bool dot, bool square, RowStats* out) {
  if (square) return row_stats_of<T, kCap, true, true>(in, row, inverse_temperature, label, out);
  if (dot) return row_stats_of<T, kCap, true, false>(in, row, inverse_temperature, label, out);
  row_stats_of<T, kCap, false, false>(in, row, inverse_temperature, label, out);
}

template <template <class, bool> class Op, class... Args>
RL_INLINE void dispatch(const rl_logits* in, Args... args) {
  const bool cap = in->softcap != 0;
  if (in->dtype == RL_F32) return cap ? Op<F32, true>::run(in, args...) : Op<F32, false>::run(in, args...);
  if (in->dtype == RL_BF16) return cap ? Op<Bf16, true>::run(in, args...) : Op<Bf16, false>::run(in, args...);
  return cap ? Op<F16, true>::run(in, args...) : Op<F16, false>::run(in, args...);
}

template <class T, bool kCap>
struct StatsOp {
  static void run(const rl_logits* in, int64_t row, float it, int64_t label, bool dot, bool square, RowStats* out) {
    row_stats_typed<T, kCap>(in, row, it, label, dot, square, out);
  }
};

void row_stats(const rl_logits* in, int64_t row, float it, int64_t label, bool dot, bool square, RowStats* out) {
  dispatch<StatsOp>(in, row, it, label, dot, square, out);
}

template <bool kCap, bool kEntropy>
RL_INLINE vf gradient_of(vf raw, const Scale& s, const RowGradient& g) {
  vf cap{}, z;
  if (kCap) {
    cap = tanhv(raw * splat(s.inverse_softcap));
    z = splat(s.softcap * s.factor) * cap;
  } else {
    z = max_keeping_nan(splat(kFloor), raw * splat(s.factor));
  }
  const vf t = z - splat(g.lse2);
  const vf p = exp2v(t);
  vf d = kEntropy ? p * fma(splat(g.b), t, splat(g.a)) : p * splat(g.a);
  if (kCap) d = d * (1.0f - cap * cap);
  return d;
}

template <class T, bool kCap, bool kEntropy>
void row_gradient_of(const rl_logits* in, int64_t row, float inverse_temperature, int64_t label, const RowGradient* grad, void* out) {
  typedef typename T::storage storage;
  const storage* p = (const storage*)in->data + row * in->row_stride;
  storage* q = (storage*)out;
  const Scale s{inverse_temperature * kLog2e, in->softcap, kCap ? 1.0f / in->softcap : 0.0f};
  const RowGradient g = *grad;
  const int64_t n = in->vocab;
  float at_target = g.at_target;
  if (kCap && label >= 0) {
    const vf cap = tanhv(splat(T::get_one(p + label)) * splat(s.inverse_softcap));
    at_target *= (1.0f - cap * cap)[0];
  }
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) T::put(q + i, gradient_of<kCap, kEntropy>(T::get(p + i), s, g));
  if (i < n) {
    const vf d = gradient_of<kCap, kEntropy>(get_tail<T>(p + i, n - i, 0.0f), s, g);
    for (int64_t j = 0; j < n - i; ++j) T::put_one(q + i + j, d[j]);
  }
  if (label >= 0) T::put_one(q + label, at_target);
}

template <class T, bool kCap>
struct GradientOp {
  static void run(const rl_logits* in, int64_t row, float it, int64_t label, const RowGradient* g, void* out) {
    if (g->b != 0) return row_gradient_of<T, kCap, true>(in, row, it, label, g, out);
    row_gradient_of<T, kCap, false>(in, row, it, label, g, out);
  }
};

void row_gradient(const rl_logits* in, int64_t row, float it, int64_t label, const RowGradient* g, void* out) {
  dispatch<GradientOp>(in, row, it, label, g, out);
}
