/* The memory layout of quantised weights: strips of VL outputs, groups of 32 inputs.
 *
 * A strip has all its quants, then all its scales. The quants of a group are four vectors with four
 * bytes per output: in vector j the low nibbles are inputs 4j to 4j + 3, the high nibbles inputs 16
 * + 4j to 19 + 4j. Fifth and sixth bits follow in planes. Q8_0 has eight vectors of bytes instead.
 * Scales keep the bits of the file; K forms keep one byte per group, multiplied with the two 16-bit
 * floats of their superblock.
 */
#ifndef TRIOLET_GROUPS_H
#define TRIOLET_GROUPS_H

#include "model.h"
#include "vectors.h"

#define GROUP 32      /* inputs that share a scale */
#define SUPER 8       /* groups of a K form that share its first scale */
#define WORD (VL * 4) /* bytes: one word of each output of a strip */

/* ggml's numbers. */
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

INLINE int is_super(const int form) { return form >= Q4_K; }
INLINE int has_fifth_bit(const int form) { return form == Q5_0 || form == Q5_1 || form == Q5_K; }
INLINE int has_minimum(const int form) {
    return form == Q4_1 || form == Q5_1 || form == Q4_K || form == Q5_K;
}

/* The quant that represents a weight of zero. */
INLINE int zero_of(const int form) {
    return form == Q4_0 ? 8 : form == Q5_0 ? 16 : form == Q6_K ? 32 : 0;
}

/* Words per output and group. */
INLINE int64_t group_words(const int form) {
    return form == Q8_0 ? 8 : form == Q6_K ? 6 : has_fifth_bit(form) ? 5 : 4;
}

/* Offset of a group's scales in bytes, from the start of its strip's scales. */
INLINE int64_t scales_at(const int form, int64_t group) {
    if (form == Q6_K) return group / SUPER * (2 + 2 * SUPER) * VL;
    if (is_super(form)) return group / SUPER * (4 + 2 * SUPER) * VL;
    return group * (has_minimum(form) ? 4 : 2) * VL;
}

/* Offset of the scale bytes of a K form's group. */
INLINE int64_t bytes_at(const int form, int64_t group) {
    return scales_at(form, group) + (form == Q6_K ? 2 : 4) * VL + group % SUPER * 2 * VL;
}

static int64_t strip_bytes(int form, int64_t groups) {
    return (groups * group_words(form) * WORD + scales_at(form, groups) + 63) / 64 * 64;
}

INLINE float half_at(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    return _cvtsh_ss(half);
}

/* Dequantise one output of a strip. */
static void strip_weights(int form, const uint8_t *strip, int64_t groups, int64_t output,
                          float *to) {
    const uint8_t *scales = strip + groups * group_words(form) * WORD;
    for (int64_t group = 0; group < groups; group++, strip += group_words(form) * WORD) {
        const uint8_t *bytes = scales + bytes_at(form, group) + (form == Q6_K ? 2 : 1) * output;
        const uint8_t *own = scales + scales_at(form, group) + 2 * output;
        for (int i = 0; i < GROUP; i++) {
            float scale = half_at(own), minimum = has_minimum(form) ? half_at(own + 2 * VL) : 0.0f;
            int q = strip[(form == Q8_0 ? i / 4 : i % 16 / 4) * WORD + 4 * output + i % 4];
            const uint8_t *plane = strip + 4 * WORD + 4 * output + i % 4;
            if (form == Q8_0) q = (int8_t)q;
            else q = i < 16 ? q & 15 : q >> 4;
            if (has_fifth_bit(form)) q |= (plane[0] >> i / 4 & 1) << 4;
            if (form == Q6_K) q |= (plane[i / 16 * WORD] >> i % 16 / 4 * 2 & 3) << 4;
            if (form == Q6_K) scale *= (float)(int8_t)bytes[i / 16];
            else if (is_super(form)) scale *= (float)bytes[0], minimum *= -(float)bytes[VL];
            to[group * GROUP + i] = scale * (float)(q - zero_of(form)) + minimum;
        }
    }
}

#endif
