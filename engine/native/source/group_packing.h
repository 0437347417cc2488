/* Pack the blocks of a GGUF file into strips when a model is loaded. */
#ifndef TRIOLET_GROUP_PACKING_H
#define TRIOLET_GROUP_PACKING_H

#include "groups.h"

INLINE int64_t block_bytes(const int form) {
    switch (form) {
        case Q4_0: return 18;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case Q8_0: return 34;
        case Q4_K: return 144;
        case Q5_K: return 176;
        default: return 210;
    }
}

/* The quants of group `group` of a block, one per byte. */
INLINE void block_quants(const int form, const uint8_t *block, int64_t group, uint8_t *to) {
    const uint8_t *from = block + (has_minimum(form) ? 4 : 2), *bits = from;
    int shift = 4, split = 16, high = 0;
    if (form == Q8_0) {
        memcpy(to, from, GROUP);
        return;
    }
    if (form == Q5_0 || form == Q5_1) from += 4; /* behind the fifth bits */
    if (form == Q4_K || form == Q5_K) {
        from = block + (form == Q4_K ? 16 : 48) + group / 2 * 32, bits = block + 16;
        shift = group % 2 * 4, split = GROUP, high = (int)group;
    } else if (form == Q6_K) {
        from = block + group / 4 * 64 + group % 2 * 32, bits = block + 128 + group / 4 * 32;
        shift = group % 4 / 2 * 4, split = GROUP, high = group % 4 * 2;
    }
    for (int i = 0; i < GROUP; i++) {
        to[i] = split == GROUP ? from[i] >> shift & 15
                               : (i < split ? from[i] & 15 : from[i - split] >> shift);
        if (form == Q5_0 || form == Q5_1) to[i] |= (bits[i / 8] >> i % 8 & 1) << 4;
        if (form == Q5_K) to[i] |= (bits[i] >> high & 1) << 4;
        if (form == Q6_K) to[i] |= (bits[i] >> high & 3) << 4;
    }
}

/* The words of a group's quants in the layout of strips. */
INLINE void group_quants(const int form, const uint8_t *quants, uint32_t *to) {
    uint32_t q[8];
    memcpy(q, quants, GROUP);
    if (form == Q8_0) {
        memcpy(to, q, GROUP);
        return;
    }
    for (int j = 0; j < 4; j++) to[j] = (q[j] & 0x0f0f0f0f) | (q[4 + j] & 0x0f0f0f0f) << 4;
    to[4] = to[5] = 0;
    for (int j = 0; j < 8; j++) {
        if (has_fifth_bit(form)) to[4] |= (q[j] >> 4 & 0x01010101) << j;
        if (form == Q6_K) to[4 + j / 4] |= (q[j] >> 4 & 0x03030303) << j % 4 * 2;
    }
}

/* Scale and minimum of a group of Q4_K or Q5_K: six bits each. */
INLINE void six_bits(const uint8_t *packed, int64_t group, uint8_t *scale, uint8_t *minimum) {
    const uint8_t *low = packed + group % 4;
    *scale = group < 4 ? low[0] & 63 : (low[8] & 15) | low[0] >> 6 << 4;
    *minimum = group < 4 ? low[4] & 63 : low[8] >> 4 | low[4] >> 6 << 4;
}

/* Check a 16-bit float of the file: returns 1 if it is not finite. */
INLINE int64_t copy_half(uint8_t *to, const uint8_t *from) {
    memcpy(to, from, 2);
    return (from[1] & 0x7c) == 0x7c;
}

/* Pack one output's blocks; returns how many scales are not finite. */
INLINE int64_t pack_output(const int form, const uint8_t *blocks, int64_t groups, int64_t output,
                           uint8_t *strip) {
    uint8_t *scales = strip + groups * group_words(form) * WORD;
    int64_t not_finite = 0;
    for (int64_t group = 0; group < groups; group++) {
        const int64_t own = is_super(form) ? group % SUPER : 0;
        const uint8_t *block = blocks + group / (is_super(form) ? SUPER : 1) * block_bytes(form);
        uint8_t *to = scales + scales_at(form, group) + 2 * output;
        uint8_t *bytes = scales + bytes_at(form, group) + (form == Q6_K ? 2 : 1) * output;
        uint8_t quants[GROUP];
        uint32_t words[8];
        block_quants(form, block, own, quants);
        group_quants(form, quants, words);
        for (int64_t j = 0; j < group_words(form); j++)
            memcpy(strip + (group * group_words(form) + j) * WORD + 4 * output, words + j, 4);
        if (form == Q6_K)
            memcpy(bytes, block + 192 + 2 * own, 2);
        else if (is_super(form))
            six_bits(block + 4, own, bytes, bytes + VL);
        if (own) continue;
        not_finite += copy_half(to, block + (form == Q6_K ? 208 : 0));
        if (has_minimum(form)) not_finite += copy_half(to + 2 * VL, block + 2);
    }
    return not_finite;
}

#define PACK(name)                                                                                \
    case name:                                                                                    \
        bad += pack_output(name, blocks, groups, o, to);                                          \
        break;

/* Fill every `every`-th strip; returns how many scales are not finite. */
static int64_t pack_strips(const GroupPacking *packing, int64_t threads) {
    const int64_t groups = packing->inputs / GROUP;
    int64_t bad = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : bad)
    for (int64_t s = 0; s < packing->num_strips; s++) {
        const Strip *strip = packing->strips + s * packing->every;
        uint8_t *to = (uint8_t *)packing->packed + strip->offset;
        memset(to, 0, (size_t)strip_bytes((int)strip->form, groups));
        for (int64_t o = 0; o < VL && s * VL + o < packing->outputs; o++) {
            const uint8_t *blocks = packing->blocks + (s * VL + o) * packing->row_bytes;
            switch (strip->form) {
                PACK(Q4_0) PACK(Q4_1) PACK(Q5_0) PACK(Q5_1)
                PACK(Q8_0) PACK(Q4_K) PACK(Q5_K) PACK(Q6_K)
            }
        }
    }
    return bad;
}

#endif
