/* Add LoRA adapters to a linear layer: two thin products for the rows that use one.
 *
 * The rows of a group are gathered, so that an adapter's weights are read once for all of them.
 * Sums have the order of product.h: a row's bits do not depend on other rows or on its group.
 */
#ifndef TRIOLET_LOW_RANK_H
#define TRIOLET_LOW_RANK_H

#include <string.h>

#include "product.h"

/* Buffers of the rows with adapters. */
typedef struct {
    char *input;   /* numbers [rows][input of the linear layer] */
    char *low;     /* numbers [rows][low_stride] */
    float *values; /* [rows][outputs of the linear layer] */
} LowRows;

/* Rows of a group times one panel of `down`; the sums are converted to numbers. */
INLINE void low_panel(const int is_bf16, const Linear *down, const Group *group, int64_t panel,
                      int64_t low_stride, const LowRows *at) {
    const int64_t row_bytes = down->steps * 4;
    const char *weight = (const char *)down->weight + panel * row_bytes * PANEL;
    for (int64_t row = group->first; row < group->end; row += MR) {
        float sums[MR * PANEL];
        const int64_t count = group->end - row < MR ? group->end - row : MR;
        multiply(is_bf16, count, at->input + row * row_bytes, row_bytes, weight, down->steps,
                 weight, sums, PANEL);
        for (int64_t r = 0; r < count; r++)
            for (int n = 0; n < NV; n++)
                v_write(is_bf16, at->low, (row + r) * low_stride + panel * PANEL + n * VL,
                        v_load(sums + r * PANEL + n * VL));
    }
}

/* The result times one panel of `up`, if the adapter has one. */
INLINE void up_panel(const int is_bf16, const LowRank *low, const Group *group, int64_t panel,
                     int64_t low_bytes, int64_t stride, const LowRows *at) {
    const Linear *up = &low->up;
    float *to = at->values + panel * PANEL;
    if (!low->down.weight) {
        for (int64_t row = group->first; row < group->end; row++)
            memset(to + row * stride, 0, PANEL * 4);
        return;
    }
    const char *weight = (const char *)up->weight + panel * up->steps * 4 * PANEL;
    for (int64_t row = group->first; row < group->end; row += MR) {
        const int64_t count = group->end - row < MR ? group->end - row : MR;
        multiply(is_bf16, count, at->low + row * low_bytes, low_bytes, weight, up->steps, weight,
                 to + row * stride, stride);
    }
}

/* Copy a row of a linear layer's input, as numbers. */
INLINE void take_row(const int is_bf16, const Linear *layer, const char *input, int64_t row,
                     char *to) {
    const int64_t inputs = layer->steps * (is_bf16 ? 2 : 1);
    if (!takes_bf16(is_bf16, layer) && is_bf16)
        for (int64_t i = 0; i < inputs; i += VL)
            v_write(1, to, i, v_load((const float *)input + row * inputs + i));
    else
        memcpy(to, input + row * layer->steps * 4, layer->steps * 4);
}

/* Compute the adapters' share of one linear layer, with all threads of the enclosing region.
 * `offset` selects the product in LayerAdapter. */
INLINE Added adapt(const int is_bf16, const Model *model, const Adapted *adapted, int64_t index,
                   size_t offset, const Linear *layer, const char *input, const LowRows *at) {
    if (!adapted->num_rows) return NOTHING_ADDED;
    const int64_t row_bytes = layer->steps * 4, stride = layer->panels * PANEL;
    const int64_t size = is_bf16 ? 2 : 4;
    const int64_t low_panels = model->low_stride / PANEL;
    /* One panel of few ranks takes less time than distributing it. */
    int64_t chunk = layer->panels / (4 * omp_get_num_threads());
    if (chunk < 1) chunk = 1;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < adapted->num_rows; i++)
        take_row(is_bf16, layer, input, adapted->rows[i], at->input + i * row_bytes);
#pragma omp for schedule(dynamic)
    for (int64_t job = 0; job < adapted->num_groups * low_panels; job++) {
        const Group *group = adapted->groups + job / low_panels;
        const LowRank *low = (const LowRank *)((const char *)(group->layers + index) + offset);
        if (low->down.weight && job % low_panels < low->down.panels)
            low_panel(is_bf16, &low->down, group, job % low_panels, model->low_stride, at);
    }
#pragma omp for schedule(dynamic, chunk)
    for (int64_t job = 0; job < adapted->num_groups * layer->panels; job++) {
        const Group *group = adapted->groups + job / layer->panels;
        const LowRank *low = (const LowRank *)((const char *)(group->layers + index) + offset);
        up_panel(is_bf16, low, group, job % layer->panels, model->low_stride * size, stride, at);
    }
    return (Added){adapted->places, at->values, stride};
}

#endif
