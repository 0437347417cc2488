/* Products with quantised weights: activations rounded to int8 in groups of 32 inputs, integer
 * sums.
 *
 * Integer sums do not depend on their order, so only the order of groups matters: each element of
 * the result adds its groups from first to last in one lane. The bits are the same for any number
 * of rows, panels and threads and for every instruction set.
 */
#ifndef TRIOLET_GROUP_PRODUCT_H
#define TRIOLET_GROUP_PRODUCT_H

#include "groups.h"

#define GROUP_ROWS 64       /* rows that share an unpacked group: their sums stay in the first cache */
#define LEAST_LARGEST 1e-30f /* below it a group of activations is zero; 127 / it is finite */

/* Scale and sums of 32 activations, which the product needs beside their int8 values. */
typedef struct {
    float scale;
    float scaled_sum;    /* scale * the sum of the int8 */
    int32_t minus_all;   /* minus that sum, */
    int32_t minus_low;   /* that of the first half, */
    int32_t minus_high;  /* and that of the second */
} Activations;

/* The rounded input of a linear layer, group by group. */
typedef struct {
    int8_t *quants;     /* [groups][rows][GROUP] */
    Activations *about; /* [groups][rows] */
    int64_t rows;
} Rounded;

/* Upper bound of bytes per rounded number. */
#define ROUNDED_BYTES(numbers) ((numbers) / GROUP * (GROUP + (int64_t)sizeof(Activations)))

INLINE Rounded place_rounded(char *memory, int64_t rows, int64_t groups) {
    return (Rounded){(int8_t *)memory, (Activations *)(memory + rows * groups * GROUP), rows};
}

/* Round 32 activations: the largest becomes 127, ties round to even. */
INLINE void round_group(const float *input, int8_t *to, Activations *about) {
    int32_t whole[GROUP], sums[2] = {0, 0};
    vf largest = v_set(0.0f);
    for (int i = 0; i < GROUP; i += VL)
        largest = v_max(v_abs(v_load(input + i)), largest);
    const float most = v_largest(largest);
    const vf inverse = v_set(most >= LEAST_LARGEST ? 127.0f / most : 0.0f);
    for (int i = 0; i < GROUP; i += VL)
        i_store(whole + i, i_round(v_mul(v_load(input + i), inverse)));
    for (int i = 0; i < GROUP; i++) to[i] = (int8_t)whole[i];
    for (int i = 0; i < GROUP; i++) sums[i / 16] += to[i];
    const float scale = most >= LEAST_LARGEST ? most / 127.0f : 0.0f;
    *about = (Activations){scale, scale * (float)(sums[0] + sums[1]), -sums[0] - sums[1], -sums[0],
                           -sums[1]};
}

/* The quants of a group, unsigned; Q8_0's are signed unless a build's products need unsigned ones.
 */
INLINE void unpack(const int form, const uint8_t *from, vi *to) {
    const vi low = i_set8(0x0f);
    if (form == Q8_0) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) to[j] = as_factor(i_load(from + j * WORD));
        return;
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const vi both = i_load(from + j * WORD);
        to[j] = i_and(both, low);
        to[4 + j] = i_and(i_right16(both, 4), low);
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        if (has_fifth_bit(form)) {
            const vi plane = i_load(from + 4 * WORD);
            const vi bit = j < 4 ? i_left16(plane, 4 - j) : i_right16(plane, j - 4);
            to[j] = i_or(to[j], i_and(bit, i_set8(0x10)));
        }
        if (form == Q6_K) {
            const vi plane = i_load(from + (4 + j / 4) * WORD);
            const vi bits = j % 4 < 2 ? i_left16(plane, 4 - j % 4 * 2) : i_right16(plane, j % 4 * 2 - 4);
            to[j] = i_or(to[j], i_and(bits, i_set8(0x30)));
        }
    }
}

/* sum + the products of words `first` to `end` of a group, in each lane. */
INLINE vi dot(const int form, vi sum, const vi *weights, const int8_t *input, const int first,
              const int end) {
#if HAS_DOTS
#pragma GCC unroll 8
    for (int j = first; j < end; j++) sum = i_dot(sum, weights[j], i_repeat(input + 4 * j));
    (void)form;
#else
    /* Products of bytes are added in pairs, and this many pairs fit into 16 bits. */
    const int together = form == Q8_0 ? 1 : form == Q6_K ? 2 : has_fifth_bit(form) ? 4 : 8;
#pragma GCC unroll 8
    for (int j = first; j < end; j += together) {
        vi pairs = i_set8(0);
#pragma GCC unroll 8
        for (int i = j; i < j + together; i++) {
            const vi factor = i_repeat(input + 4 * i);
            const vi some = form == Q8_0 ? i_pairs_signed(weights[i], factor)
                                         : i_pairs(weights[i], factor);
            pairs = i == j ? some : i_add16(pairs, some);
        }
        sum = i_add(sum, i_sum_pairs(pairs));
    }
#endif
    return sum;
}

/* A group's scales for each output of a strip. */
typedef struct {
    vf scale;
    vf minimum;
    vi halves[2]; /* of Q6_K */
} Scales;

INLINE Scales load_scales(const int form, const uint8_t *scales, int64_t group) {
    const uint8_t *own = scales + scales_at(form, group), *bytes = scales + bytes_at(form, group);
    Scales to = {v_load_half(own), v_set(0.0f), {i_set8(0), i_set8(0)}};
    if (has_minimum(form)) to.minimum = v_load_half(own + 2 * VL);
    if (form == Q6_K) {
        const vi both = i_load_pairs(bytes);
        to.halves[0] = i_right(i_left(both, 16), 16);
        to.halves[1] = i_right(both, 16);
    } else if (is_super(form)) {
        to.scale = v_mul(to.scale, i_float(i_load_bytes(bytes)));
        to.minimum = v_sub(v_set(0.0f), v_mul(to.minimum, i_float(i_load_bytes(bytes + VL))));
    }
    return to;
}

/* sum + a row's group times that of a strip. */
INLINE vf add_group(const int form, vf sum, const vi *weights, const Scales *scales,
                    const int8_t *input, const Activations *about) {
    const vf scale = v_mul(scales->scale, v_set(about->scale));
    vi whole;
    if (form == Q6_K) {
        const vi low = i_left(i_repeat(&about->minus_low), 5);
        const vi high = i_left(i_repeat(&about->minus_high), 5);
        whole = i_add(i_mul(dot(form, low, weights, input, 0, 4), scales->halves[0]),
                      i_mul(dot(form, high, weights, input, 4, 8), scales->halves[1]));
    } else {
        const int shift = form == Q4_0 ? 3 : form == Q5_0 ? 4 : form == Q8_0 ? FACTOR_SHIFT : 0;
        vi begin = i_set8(0);
        if (shift) begin = i_left(i_repeat(&about->minus_all), shift);
        whole = dot(form, begin, weights, input, 0, 8);
    }
    if (!has_minimum(form)) return v_fma(i_float(whole), scale, sum);
    const vf minimum = v_mul(scales->minimum, v_set(about->scaled_sum));
    return v_add(sum, v_fma(i_float(whole), scale, minimum));
}

/* Rows starting at `first` times a strip; sums are PANEL floats apart. */
INLINE void strip_rows(const int form, const int is_one, const uint8_t *strip, int64_t groups,
                       const Rounded *input, int64_t first, int64_t rows, float *sums) {
    const uint8_t *scales = strip + groups * group_words(form) * WORD;
    const char *next = (const char *)scales + strip_bytes(form, groups); /* the next strip's */
    const Rounded given = *input; /* of its own: no store of a sum can change it */
    vf only = v_set(0.0f);
    if (!is_one)
        for (int64_t r = 0; r < rows; r++) v_store(sums + r * PANEL, only);
    for (int64_t group = 0; group < groups; group++, strip += group_words(form) * WORD) {
        vi weights[8];
        const int64_t at = group * given.rows + first;
        const Scales own = load_scales(form, scales, group);
        for (int64_t line = 0; line < group_words(form) * WORD; line += 64)
            _mm_prefetch((const char *)strip + AHEAD + line, _MM_HINT_T1);
        _mm_prefetch(next + (is_super(form) ? bytes_at(form, group) : scales_at(form, group)),
                     _MM_HINT_T0);
        unpack(form, strip, weights);
        if (is_one)
            only = add_group(form, only, weights, &own, given.quants + at * GROUP,
                             given.about + at);
        else
            for (int64_t r = 0; r < rows; r++)
                v_store(sums + r * PANEL,
                        add_group(form, v_load(sums + r * PANEL), weights, &own,
                                  given.quants + (at + r) * GROUP, given.about + at + r));
    }
    if (is_one) v_store(sums, only);
}

#define DEFINE_STRIP(form)                                                                        \
    static void strip_##form(const uint8_t *strip, int64_t groups, const Rounded *input,          \
                             int64_t first, int64_t rows, float *sums) {                          \
        if (rows == 1)                                                                            \
            strip_rows(form, 1, strip, groups, input, first, 1, sums);                            \
        else                                                                                      \
            strip_rows(form, 0, strip, groups, input, first, rows, sums);                         \
    }
DEFINE_STRIP(Q4_0)
DEFINE_STRIP(Q4_1)
DEFINE_STRIP(Q5_0)
DEFINE_STRIP(Q5_1)
DEFINE_STRIP(Q8_0)
DEFINE_STRIP(Q4_K)
DEFINE_STRIP(Q5_K)
DEFINE_STRIP(Q6_K)

/* Rows `first` to `end` (at most GROUP_ROWS) times one panel of NV strips. */
static void group_panel(const Linear *layer, int64_t groups, const Rounded *input, int64_t first,
                        int64_t end, int64_t panel, float *sums) {
    for (int64_t n = 0; n < NV; n++) {
        const Strip *strip = layer->strips + panel * NV + n;
        const uint8_t *from = (const uint8_t *)layer->weight + strip->offset;
        void (*multiply_strip)(const uint8_t *, int64_t, const Rounded *, int64_t, int64_t,
                               float *) = strip_Q4_0;
        switch (strip->form) {
            case Q4_1: multiply_strip = strip_Q4_1; break;
            case Q5_0: multiply_strip = strip_Q5_0; break;
            case Q5_1: multiply_strip = strip_Q5_1; break;
            case Q8_0: multiply_strip = strip_Q8_0; break;
            case Q4_K: multiply_strip = strip_Q4_K; break;
            case Q5_K: multiply_strip = strip_Q5_K; break;
            case Q6_K: multiply_strip = strip_Q6_K; break;
        }
        multiply_strip(from, groups, input, first, end - first, sums + n * VL);
    }
}

#endif
