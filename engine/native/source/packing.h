/* Pack a checkpoint's weights into the panels that product.h reads, when a model is loaded.
 *
 * A panel holds neighbouring outputs, or half gates and half the ups that belong to them.
 */
#ifndef TRIOLET_PACKING_H
#define TRIOLET_PACKING_H

#include "model.h"
#include "turn.h"

/* Address of the weights of a panel's output; zeros for padding. */
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

static void pack(const Packing *packing, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < packing->panels; panel++) pack_numbers(packing, panel);
}

#endif
