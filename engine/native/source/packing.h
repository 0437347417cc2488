/* Weights of a checkpoint cut into panels, as product.h reads them: once, while a model is loaded.
 *
 * A panel's outputs are neighbours, or half of them gates and half the ups that belong to them. With
 * scales a row is rounded to int8: its largest number becomes 127, and none is off by more than half
 * a scale.
 */
#ifndef TRIOLET_PACKING_H
#define TRIOLET_PACKING_H

#include <math.h>

#include "model.h"
#include "turn.h"

/* Where the weights of a panel's output lie; zeros where there is no such output. */
INLINE const char *source_row(const Packing *packing, int64_t panel, int64_t column) {
    int64_t outputs = packing->outputs, row = panel * PANEL + column, before = 0;
    if (packing->is_gate_up) {
        outputs /= 2;
        row = panel * (PANEL / 2) + column % (PANEL / 2);
        before = column < PANEL / 2 ? 0 : outputs;
    }
    if (row >= outputs) return packing->nothing;
    return packing->weight + (before + row) * packing->inputs * (packing->is_bf16 ? 2 : 4);
}

INLINE float number(const Packing *packing, const char *row, int64_t i) {
    uint32_t word = 0;
    if (packing->is_bf16)
        memcpy((char *)&word + 2, row + 2 * i, 2);
    else
        memcpy(&word, row + 4 * i, 4);
    float value;
    memcpy(&value, &word, 4);
    return value;
}

INLINE void pack_numbers(const Packing *packing, int64_t panel) {
    const int64_t words = packing->inputs * (packing->is_bf16 ? 2 : 4) / 4;
    float *to = (float *)packing->packed + panel * packing->steps * PANEL;
    for (int64_t column = 0; column < PANEL; column += VL) {
        const char *from[VL];
        for (int64_t i = 0; i < VL; i++) from[i] = source_row(packing, panel, column + i);
        turn(from, 0, words, to + column);
    }
    memset(to + words * PANEL, 0, (packing->steps - words) * PANEL * 4);
}

INLINE void pack_int8(const Packing *packing, int64_t panel) {
    const int64_t per_word = packing->is_bf16 ? 2 : 1;
    int8_t *to = (int8_t *)packing->packed + panel * packing->steps * PANEL * per_word;
    for (int64_t column = 0; column < PANEL; column++) {
        const char *from = source_row(packing, panel, column);
        float largest = 0.0f;
        for (int64_t i = 0; i < packing->inputs; i++) {
            const float size = fabsf(number(packing, from, i));
            if (size > largest) largest = size;
        }
        const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        packing->scales[panel * PANEL + column] = largest / 127.0f;
        for (int64_t i = 0; i < packing->steps * per_word; i++) {
            const float scaled = i < packing->inputs ? number(packing, from, i) * inverse : 0.0f;
            to[(i / per_word * PANEL + column) * per_word + i % per_word] = (int8_t)rintf(scaled);
        }
    }
}

static void pack(const Packing *packing, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < packing->panels; panel++) {
        if (packing->scales)
            pack_int8(packing, panel);
        else
            pack_numbers(packing, panel);
    }
}

#endif
