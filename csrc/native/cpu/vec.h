// Vectors of the instruction set this file is compiled for. Included by the level files only, inside their own anonymous
// namespace: code built for one level must never be merged by the linker with that of another. So: no std templates here.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vf __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint8_t vb __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef uint16_t vh __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

#define RL_INLINE inline __attribute__((always_inline))

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;
constexpr float kFloor = -1e30f;  // stands for -inf in scaled logits: exp2 of it is 0 and no arithmetic makes it NaN

RL_INLINE vf splat(float x) { return x - vf{}; }
RL_INLINE vi splat_int(int32_t x) { return x - vi{}; }
RL_INLINE vf load(const float* p) { return *reinterpret_cast<const vf*>(p); }
RL_INLINE void store(float* p, vf x) { *reinterpret_cast<vf*>(p) = x; }

// NaN in `x` comes through, which is why the order of the operands matters.
RL_INLINE vf max_keeping_nan(vf floor, vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)floor, (__m512)x);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)floor, (__m256)x);
#else
  return floor > x ? floor : x;
#endif
}

RL_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

RL_INLINE vf exp2_fraction(vf r) {  // 2^r for r in [-0.5, 0.5], 1 at 0, 2e-7 relative
  vf p = splat(0.001326472614891827f);
  p = fma(p, r, splat(0.009671512991189957f));
  p = fma(p, r, splat(0.05550733581185341f));
  p = fma(p, r, splat(0.24022242426872253f));
  p = fma(p, r, splat(0.6931470036506653f));
  return fma(p, r, splat(1.0f));
}

// 2^t for finite t or NaN; 0 far below. Overflow is the caller's to prevent on the levels below AVX-512.
RL_INLINE vf exp2v(vf t) {
#if defined(__AVX512F__)
  const __m512 n = _mm512_roundscale_ps((__m512)t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (vf)_mm512_scalef_ps((__m512)exp2_fraction(t - (vf)n), n);
#else
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const vf bounded = max_keeping_nan(splat(-126.0f), t);
  const vf shifted = bounded + splat(kRounder);
  const vf p = exp2_fraction(bounded - (shifted - splat(kRounder)));
  const vu exponent = ((vu)shifted - (vu)splat(kRounder)) << 23;  // unsigned: of NaN it is anything
  const vf scaled = (vf)((vu)p + exponent);
  const vf nan_or = t != t ? t : scaled;
  return t < splat(-126.0f) ? vf{} : nan_or;
#endif
}

RL_INLINE vf expv(vf x) { return exp2v(x * splat(kLog2e)); }

RL_INLINE vf widen(const uint16_t* p) {  // bf16
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  return (vf)(__builtin_convertvector(*reinterpret_cast<const vh*>(p), vu) << 16);
#endif
}

RL_INLINE vi widen(const uint8_t* p) {  // what gcc makes of a conversion of vectors takes the bytes one by one
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return __builtin_convertvector(*reinterpret_cast<const vb*>(p), vi);
#endif
}

RL_INLINE uint16_t narrow_one(float x) {  // to bf16, nearest even
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if (x != x) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

RL_INLINE void narrow(uint16_t* p, vf x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  const vu bits = (vu)x;
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const vu result = x != x ? ((bits >> 16) | 0x40u) : rounded;
  *reinterpret_cast<vh*>(p) = __builtin_convertvector(result, vh);
#endif
}

RL_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
  uint32_t bits;
  if (magnitude >= 0x7c00) {
    bits = sign | 0x7f800000u | (magnitude & 0x3ff) << 13;
  } else if (magnitude >= 0x400) {
    bits = sign | ((magnitude << 13) + 0x38000000u);
  } else {
    const float small = (float)magnitude * 5.9604644775390625e-8f;
    __builtin_memcpy(&bits, &small, 4);
    bits |= sign;
  }
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

RL_INLINE uint16_t float_to_half(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7e00;
  if (bits >= 0x477ff000u) return sign | 0x7c00;
  if (bits < 0x38800000u) {  // subnormal or 0: the adder rounds
    float magnitude;
    __builtin_memcpy(&magnitude, &bits, 4);
    const float aligned_sum = magnitude + 0.5f;
    uint32_t sum_bits;
    __builtin_memcpy(&sum_bits, &aligned_sum, 4);
    return sign | (uint16_t)(sum_bits - 0x3f000000u);
  }
  return sign | (uint16_t)((bits - 0x38000000u + 0xfff + ((bits >> 13) & 1)) >> 13);
}

struct F32 {
  typedef float storage;
  static RL_INLINE vf get(const float* p) { return load(p); }
  static RL_INLINE void put(float* p, vf x) { store(p, x); }
  static RL_INLINE float get_one(const float* p) { return *p; }
  static RL_INLINE void put_one(float* p, float x) { *p = x; }
};

struct Bf16 {
  typedef uint16_t storage;
  static RL_INLINE vf get(const uint16_t* p) { return widen(p); }
  static RL_INLINE void put(uint16_t* p, vf x) { narrow(p, x); }
  static RL_INLINE float get_one(const uint16_t* p) {
    const uint32_t bits = (uint32_t)*p << 16;
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
  }
  static RL_INLINE void put_one(uint16_t* p, float x) { *p = narrow_one(x); }
};

struct F16 {
  typedef uint16_t storage;
  static RL_INLINE float get_one(const uint16_t* p) { return half_to_float(*p); }
  static RL_INLINE void put_one(uint16_t* p, float x) { *p = float_to_half(x); }
#if defined(__AVX512F__)
  static RL_INLINE vf get(const uint16_t* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static RL_INLINE void put(uint16_t* p, vf x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#elif defined(__F16C__)
  static RL_INLINE vf get(const uint16_t* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static RL_INLINE void put(uint16_t* p, vf x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#else
  static RL_INLINE vf get(const uint16_t* p) {
    vf x;
    for (int i = 0; i < kLanes; ++i) x[i] = half_to_float(p[i]);
    return x;
  }
  static RL_INLINE void put(uint16_t* p, vf x) {
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(x[i]);
  }
#endif
};

RL_INLINE float add_lanes(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
#endif
}

RL_INLINE double sum_lanes(vf x) {
#if defined(__AVX512F__)
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
  const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1));
  return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
#else
  double total = 0;
  for (int i = 0; i < kLanes; ++i) total += (double)x[i];
  return total;
#endif
}

RL_INLINE float max_lane(vf x) {
  float top = x[0];
  for (int i = 1; i < kLanes; ++i) top = x[i] > top ? x[i] : top;
  return top;
}
