// A token of one row of float32 logits: by inverting the cumulative distribution, or the most likely one. Included by level.h.

RL_INLINE vf draw_lanes(const float* logits, int64_t left, float factor) {  // the floor beyond the end
  const Scale s{factor, 0, 0};
  return scaled<false>(left >= kLanes ? load(logits) : get_tail<F32>(logits, left, -__builtin_inff()), s);
}

int64_t row_pick(const float* logits, int64_t vocab, float factor, float top, double threshold) {
  double mass = 0;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    const vf e = exp2v(draw_lanes(logits + i, vocab - i, factor) - splat(top));
    const double sum = sum_lanes(e);
    double within = mass;
    if (mass + sum > threshold)
      for (int j = 0; j < kLanes && i + j < vocab; ++j) {
        within += (double)e[j];
        if (within > threshold) return i + j;
      }
    mass += sum;
  }
  for (int64_t i = vocab - 1; i > 0; --i)  // rounding has left a little: the last token that can be drawn
    if (logits[i] * factor - top >= -126.0f) return i;
  return 0;
}

int64_t row_top(const float* logits, int64_t vocab, float factor, float top) {
  int64_t found = 0;
  float best = -__builtin_inff();
  for (int64_t i = 0; i < vocab; i += kLanes) {
    const vi is_top = draw_lanes(logits + i, vocab - i, factor) == splat(top);
    if (sum_lanes((vf)(is_top & (vi)splat(1.0f))) == 0) continue;
    for (int64_t j = i; j < i + kLanes && j < vocab; ++j)  // scaling may have made two logits the same
      if (logits[j] > best) best = logits[j], found = j;
  }
  return found;
}
