/* The vector type of floats (AVX-512 or AVX2) and its operations, on which all kernels are built.
 *
 * A build's compiler flags select the instruction set; the kernels have one source for all builds.
 * A panel is NV vectors wide, like a tile of a product.
 *
 * All builds give the same bits. Therefore sums across lanes use SUM_LANES lanes and then halves in
 * every build, and products of bf16 pairs follow AVX512-BF16: odd elements first, each rounded,
 * without subnormal numbers (see `flush_subnormals`).
 */
#ifndef TRIOLET_VECTORS_H
#define TRIOLET_VECTORS_H

#include <float.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)

#define VL 16
#define NV 2
#define MR 12      /* 24 sums, 2 columns and a factor: 27 of 32 registers */
#define FEW_ROWS 6 /* with 4 sums each, 4 columns and a factor: 29; see few_rows.h */
#define WIDENS 0
typedef __m512 vf;
typedef __m512i vi;

INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf v_set(float x) { return _mm512_set1_ps(x); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE float v_sum(vf x) {
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x), high);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE float v_largest(vf x) { return _mm512_reduce_max_ps(x); }
/* Four bytes, whatever they mean, in every lane. */
INLINE vf v_repeat(const void *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return _mm512_castsi512_ps(_mm512_set1_epi32(word));
}
/* The first `count` lanes of x, `other` in the rest. */
INLINE vf v_first(vf x, int64_t count, vf other) {
    __mmask16 mask = count >= VL ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
    return _mm512_mask_blend_ps(mask, other, x);
}
INLINE vf v_round(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
INLINE vf v_power_of_two(vf whole) {
    vi bits = _mm512_add_epi32(_mm512_cvtps_epi32(whole), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}
INLINE vf v_even(vf pair) { /* the lower bf16 of each lane */
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pair), 16));
}
INLINE vf v_odd(vf pair) {
    vi mask = _mm512_set1_epi32((int)0xffff0000);
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pair), mask));
}
INLINE vf v_load_bf16(const uint16_t *p) {
    vi wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE void v_store_bf16(uint16_t *p, vf x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
    vi bits = _mm512_castps_si512(x);
    vi last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    vi up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
    /* A NaN must not round up to infinity. */
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    up = _mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
#endif
}
/* Interleave two rows of bf16: lane i holds low[i] and, above it, high[i]. */
INLINE vf v_pairs(const uint16_t *low, const uint16_t *high) {
    vi l = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)low));
    vi h = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)high));
    return _mm512_castsi512_ps(_mm512_or_si512(l, _mm512_slli_epi32(h, 16)));
}
/* The same for 2 * VL numbers of each row. */
INLINE void v_pairs_twice(const uint16_t *low, const uint16_t *high, vf *to) {
    const vi first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                      39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const vi second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    vi l = _mm512_loadu_si512(low), h = _mm512_loadu_si512(high);
    to[0] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(l, first, h));
    to[1] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(l, second, h));
}
INLINE vf v_abs(vf x) { return _mm512_abs_ps(x); }
INLINE vf v_load_half(const void *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

/* Integers: 32 bits unless a name contains 8 or 16. */
INLINE vi i_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void i_store(void *p, vi x) { _mm512_storeu_si512(p, x); }
INLINE vi i_set8(int8_t x) { return _mm512_set1_epi8(x); }
INLINE vi i_and(vi a, vi b) { return _mm512_and_si512(a, b); }
INLINE vi i_or(vi a, vi b) { return _mm512_or_si512(a, b); }
INLINE vi i_add8(vi a, vi b) { return _mm512_add_epi8(a, b); }
INLINE vi i_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi i_mul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
INLINE vi i_left(vi x, int n) { return _mm512_slli_epi32(x, (unsigned)n); }
INLINE vi i_right(vi x, int n) { return _mm512_srai_epi32(x, (unsigned)n); }
INLINE vi i_left16(vi x, int n) { return _mm512_slli_epi16(x, (unsigned)n); }
INLINE vi i_right16(vi x, int n) { return _mm512_srli_epi16(x, (unsigned)n); }
INLINE vi i_round(vf x) { return _mm512_cvtps_epi32(x); }
INLINE vf i_float(vi x) { return _mm512_cvtepi32_ps(x); }
INLINE vi i_load_bytes(const void *p) { /* unsigned, one in each lane */
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
INLINE vi i_load_pairs(const void *p) { /* signed, two in each lane */
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
}
#if defined(__AVX512VNNI__)
#define HAS_DOTS 1
INLINE vi i_dot(vi sum, vi bytes, vi factors) { return _mm512_dpbusd_epi32(sum, bytes, factors); }
#else
INLINE vi i_add16(vi a, vi b) { return _mm512_add_epi16(a, b); }
INLINE vi i_sum_pairs(vi x) { return _mm512_madd_epi16(x, _mm512_set1_epi16(1)); }
INLINE vi i_pairs(vi bytes, vi factors) { return _mm512_maddubs_epi16(bytes, factors); }
INLINE vi i_pairs_signed(vi bytes, vi factors) {
    const __mmask64 negative = _mm512_movepi8_mask(bytes);
    factors = _mm512_mask_sub_epi8(factors, negative, _mm512_setzero_si512(), factors);
    return _mm512_maddubs_epi16(_mm512_abs_epi8(bytes), factors);
}
#endif

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#define VL 8
#define NV 2
#define MR 6       /* 12 sums, 2 columns and a factor: 15 of 16 registers */
#define FEW_ROWS 4 /* with more, packed values are as fast; see few_rows.h */
#define WIDENS 1   /* products of several rows take bf16 as floats: see product.h */
typedef __m256 vf;
typedef __m256i vi;

INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
INLINE vf v_set(float x) { return _mm256_set1_ps(x); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE float v_sum(vf x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE float v_largest(vf x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
INLINE vf v_repeat(const void *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return _mm256_castsi256_ps(_mm256_set1_epi32(word));
}
INLINE vf v_first(vf x, int64_t count, vf other) {
    int clipped = count >= VL ? VL : count <= 0 ? 0 : (int)count;
    vi lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    vi mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(clipped), lane);
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(mask));
}
INLINE vf v_round(vf x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE vf v_power_of_two(vf whole) {
    vi bits = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
INLINE vf v_even(vf pair) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pair), 16));
}
INLINE vf v_odd(vf pair) {
    return _mm256_and_ps(pair, _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000)));
}
INLINE vf v_load_bf16(const uint16_t *p) {
    vi wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE void v_store_bf16(uint16_t *p, vf x) {
    vi bits = _mm256_castps_si256(x);
    vi last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    vi up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
    vi nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    up = _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), nan);
    up = _mm256_srli_epi32(up, 16);
    __m128i low = _mm256_castsi256_si128(up), high = _mm256_extracti128_si256(up, 1);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(low, high));
}
INLINE vf v_pairs(const uint16_t *low, const uint16_t *high) {
    vi l = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)low));
    vi h = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)high));
    return _mm256_castsi256_ps(_mm256_or_si256(l, _mm256_slli_epi32(h, 16)));
}
INLINE vf v_abs(vf x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
INLINE vf v_load_half(const void *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

INLINE vi i_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE void i_store(void *p, vi x) { _mm256_storeu_si256((__m256i *)p, x); }
INLINE vi i_set8(int8_t x) { return _mm256_set1_epi8(x); }
INLINE vi i_and(vi a, vi b) { return _mm256_and_si256(a, b); }
INLINE vi i_or(vi a, vi b) { return _mm256_or_si256(a, b); }
INLINE vi i_add8(vi a, vi b) { return _mm256_add_epi8(a, b); }
INLINE vi i_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE vi i_mul(vi a, vi b) { return _mm256_mullo_epi32(a, b); }
INLINE vi i_left(vi x, int n) { return _mm256_slli_epi32(x, n); }
INLINE vi i_right(vi x, int n) { return _mm256_srai_epi32(x, n); }
INLINE vi i_left16(vi x, int n) { return _mm256_slli_epi16(x, n); }
INLINE vi i_right16(vi x, int n) { return _mm256_srli_epi16(x, n); }
INLINE vi i_round(vf x) { return _mm256_cvtps_epi32(x); }
INLINE vf i_float(vi x) { return _mm256_cvtepi32_ps(x); }
INLINE vi i_load_bytes(const void *p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
INLINE vi i_load_pairs(const void *p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
}
#if defined(__AVXVNNI__)
#define HAS_DOTS 1
INLINE vi i_dot(vi sum, vi bytes, vi factors) {
    return _mm256_dpbusd_avx_epi32(sum, bytes, factors);
}
#else
INLINE vi i_add16(vi a, vi b) { return _mm256_add_epi16(a, b); }
INLINE vi i_sum_pairs(vi x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
INLINE vi i_pairs(vi bytes, vi factors) { return _mm256_maddubs_epi16(bytes, factors); }
INLINE vi i_pairs_signed(vi bytes, vi factors) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(factors, bytes));
}
#endif

#else
#error "the kernels need AVX-512 or AVX2 with FMA and F16C"
#endif

#define PANEL (NV * VL)
#define SUM_LANES 16
#define PARTS (SUM_LANES / VL)

/* Four bytes, whatever they mean, in every lane. */
INLINE vi i_repeat(const void *p) {
#if defined(__AVX512F__)
    return _mm512_castps_si512(v_repeat(p));
#else
    return _mm256_castps_si256(v_repeat(p));
#endif
}

/* Signed bytes in the form that byte products take. If these take unsigned bytes only, 128 is
 * added, and the result is too large by 2^FACTOR_SHIFT times the sum of the other factors. */
#if defined(HAS_DOTS)
#define FACTOR_SHIFT 7
INLINE vi as_factor(vi bytes) { return i_add8(bytes, i_set8(-128)); }
#else
#define HAS_DOTS 0
#define FACTOR_SHIFT 0
INLINE vi as_factor(vi bytes) { return bytes; }
#endif

/* The sum of SUM_LANES lanes. */
INLINE float v_total(const vf *parts) {
    return v_sum(PARTS == 1 ? parts[0] : v_add(parts[0], parts[PARTS - 1]));
}

/* AVX512-BF16 always treats subnormal numbers as zero. Between these two calls all other
 * instructions do so too. */
INLINE unsigned flush_subnormals(void) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040); /* FTZ and DAZ */
    return before;
}
INLINE void restore_subnormals(unsigned before) { _mm_setcsr(before); }

/* sum + factor * column. In bf16 a lane holds two neighbours along the summed dimension. */
INLINE vf v_step(const int is_bf16, vf sum, vf factor, vf column) {
    if (!is_bf16) return v_fma(factor, column, sum);
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)factor, (__m512bh)column);
#else
    sum = v_fma(v_odd(factor), v_odd(column), sum);
    return v_fma(v_even(factor), v_even(column), sum);
#endif
}

/* VL numbers of a tensor, starting at index i. */
INLINE vf v_read(const int is_bf16, const void *p, int64_t i) {
    return is_bf16 ? v_load_bf16((const uint16_t *)p + i) : v_load((const float *)p + i);
}
INLINE void v_write(const int is_bf16, void *p, int64_t i, vf x) {
    if (is_bf16)
        v_store_bf16((uint16_t *)p + i, x);
    else
        v_store((float *)p + i, x);
}

/* Words of numbers as floats, the second of each pair first: the order in which v_step adds them.
 */
INLINE void v_widen(const vf pair, float *odd, float *even) {
    v_store(odd, v_odd(pair));
    v_store(even, v_even(pair));
}

/* exp(x) within 2 ULP; constant below -87 and above 88. Cody and
 * Waite's reduction, then Taylor's polynomial of degree 7. */
INLINE vf v_exp(vf x) {
    x = v_min(v_max(x, v_set(-87.0f)), v_set(88.0f));
    vf n = v_round(v_mul(x, v_set(1.44269504f)));
    vf r = v_fma(n, v_set(-0.693359375f), x);
    r = v_fma(n, v_set(2.12194440e-4f), r);
    vf y = v_set(1.0f / 5040);
    y = v_fma(y, r, v_set(1.0f / 720));
    y = v_fma(y, r, v_set(1.0f / 120));
    y = v_fma(y, r, v_set(1.0f / 24));
    y = v_fma(y, r, v_set(1.0f / 6));
    y = v_fma(y, r, v_set(0.5f));
    y = v_fma(y, r, v_set(1.0f));
    y = v_fma(y, r, v_set(1.0f));
    return v_mul(y, v_power_of_two(n));
}

#endif
