// tanh of a vector. Included beside vec.h.

RL_INLINE vf tanhv(vf x) {
  const vf sign = (vf)((vi)x & splat_int((int32_t)0x80000000));
  const vf magnitude = (vf)((vi)x & splat_int(0x7fffffff));
  const vf e = exp2v(max_keeping_nan(splat(-200.0f), magnitude * splat(-2.0f * kLog2e)));
  const vf series = magnitude * (1.0f - magnitude * magnitude * (1.0f / 3));  // where 1 - e would cancel
  const vf t = magnitude < splat(0.01f) ? series : (1.0f - e) / (1.0f + e);
  return (vf)((vi)t | (vi)sign);
}
