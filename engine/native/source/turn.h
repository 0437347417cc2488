/* Transpose rows of words into columns, to pack weights and keys into panels. */
#ifndef TRIOLET_TURN_H
#define TRIOLET_TURN_H

#include "vectors.h"

/* Transpose words of VL rows: to[word][PANEL] = from[first + row][word], one row per lane. */
INLINE void turn(const char *const *from, int64_t first, int64_t words, float *to) {
#if defined(__AVX512F__)
    for (int64_t word = 0; word + VL <= words; word += VL) {
        vi a[16], b[16];
        for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from[first + i] + word * 4);
        for (int i = 0; i < 16; i += 2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
        for (int i = 0; i < 16; i += 4) {
            a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
        /* a[4g + j], quarter q: word 4q + j of keys 4g to 4g + 3. */
        for (int j = 0; j < 4; j++) {
            vi low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
            vi low_odd = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
            vi high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
            vi high_odd = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
            b[j] = _mm512_shuffle_i32x4(low, high, 0x88);
            b[8 + j] = _mm512_shuffle_i32x4(low, high, 0xdd);
            b[4 + j] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
            b[12 + j] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
        }
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + (word + i) * PANEL, b[i]);
    }
    for (int64_t word = words / VL * VL; word < words; word++)
#else
    for (int64_t word = 0; word + 4 <= words; word += 4) {
        /* Rows i and i + 4 share a register, so that no word crosses its middle later. */
        __m256d a[4];
        vf b[4];
        for (int i = 0; i < 4; i++) {
            const char *low = from[first + i] + word * 4, *high = from[first + 4 + i] + word * 4;
            b[i] = _mm256_castps128_ps256(_mm_loadu_ps((const float *)low));
            b[i] = _mm256_insertf128_ps(b[i], _mm_loadu_ps((const float *)high), 1);
        }
        for (int i = 0; i < 4; i += 2) {
            a[i] = _mm256_castps_pd(_mm256_unpacklo_ps(b[i], b[i + 1]));
            a[i + 1] = _mm256_castps_pd(_mm256_unpackhi_ps(b[i], b[i + 1]));
        }
        float *row = to + word * PANEL;
        for (int i = 0; i < 2; i++) {
            v_store(row + 2 * i * PANEL, _mm256_castpd_ps(_mm256_unpacklo_pd(a[i], a[i + 2])));
            v_store(row + (2 * i + 1) * PANEL,
                    _mm256_castpd_ps(_mm256_unpackhi_pd(a[i], a[i + 2])));
        }
    }
    for (int64_t word = words / 4 * 4; word < words; word++)
#endif
        for (int i = 0; i < VL; i++)
            memcpy(to + word * PANEL + i, from[first + i] + word * 4, 4);
}

#endif
