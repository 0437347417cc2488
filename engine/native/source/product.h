/* Matrix products with a fixed order of summation.
 *
 * Each element of the result is summed from the first input to the last in one register lane, for
 * any number of rows and any division among threads. So a row has the same bits in every batch, and
 * in prefill as in decode.
 */
#ifndef TRIOLET_PRODUCT_H
#define TRIOLET_PRODUCT_H

#include <omp.h>

#include "model.h"
#include "vectors.h"

#define AHEAD 12288       /* bytes: how far ahead of use a panel is fetched into the cache */
#define NEAR (512 * 1024) /* bytes of input that stay in the second-level cache beside a panel */
#define PIECE 128         /* words of a panel that are widened at a time */
#define PIECE_ROWS 120    /* rows that share a widened piece; with it they fill the first cache */
#define WIDE_ROWS 32      /* from so many on, widening a panel takes less time than it saves */

#include "group_product.h"

/* `rows` rows times one panel. Rows are `stride` bytes apart.
 * result[r][PANEL] = (adds ? result : 0) + input[r] . panel
 * With each step a few bytes are prefetched from `fetch`, as many in all as the panel has, so that
 * the next data arrives while the sums keep the core busy. */
INLINE void multiply_rows(const int is_bf16, const int rows, const int adds, const char *input,
                          int64_t stride, const char *panel, int64_t steps, const char *fetch,
                          float *result, int64_t result_stride) {
    vf sums[MR][NV];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int n = 0; n < NV; n++)
            sums[r][n] = adds ? v_load(result + r * result_stride + n * VL) : v_set(0.0f);
    for (int64_t s = 0; s < steps; s++) {
        vf columns[NV];
#pragma GCC unroll 2
        for (int n = 0; n < NV; n++)
            columns[n] = v_load((const float *)panel + (s * NV + n) * VL);
        _mm_prefetch(fetch + s * PANEL * 4, _MM_HINT_T0);
        if (PANEL * 4 > 64) _mm_prefetch(fetch + s * PANEL * 4 + 64, _MM_HINT_T0);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            vf factor = v_repeat(input + r * stride + s * 4);
#pragma GCC unroll 2
            for (int n = 0; n < NV; n++)
                sums[r][n] = v_step(is_bf16, sums[r][n], factor, columns[n]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int n = 0; n < NV; n++) v_store(result + r * result_stride + n * VL, sums[r][n]);
}

#define ROWS(n)                                                                                  \
    case n:                                                                                      \
        multiply_rows(is_bf16, n, adds, input, stride, panel, steps, fetch, result,              \
                      result_stride);                                                            \
        break;
#define DEFINE_MULTIPLY(name, bf16, add)                                                         \
    static void name(int64_t rows, const char *input, int64_t stride, const char *panel,         \
                     int64_t steps, const char *fetch, float *result, int64_t result_stride) {   \
        const int is_bf16 = bf16, adds = add;                                                    \
        switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) MORE_ROWS }              \
    }
#if MR > 6
#define MORE_ROWS ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#else
#define MORE_ROWS
#endif
DEFINE_MULTIPLY(multiply_bf16, 1, 0)
DEFINE_MULTIPLY(multiply_f32, 0, 0)
DEFINE_MULTIPLY(multiply_add_bf16, 1, 1)
DEFINE_MULTIPLY(multiply_add_f32, 0, 1)

/* Up to MR rows times one panel. */
INLINE void multiply(const int is_bf16, int64_t rows, const char *input, int64_t stride,
                     const char *panel, int64_t steps, const char *fetch, float *result,
                     int64_t result_stride) {
    (is_bf16 ? multiply_bf16 : multiply_f32)(rows, input, stride, panel, steps, fetch, result,
                                              result_stride);
}
INLINE void multiply_add(const int is_bf16, int64_t rows, const char *input, int64_t stride,
                         const char *panel, int64_t steps, const char *fetch, float *result,
                     int64_t result_stride) {
    (is_bf16 ? multiply_add_bf16 : multiply_add_f32)(rows, input, stride, panel, steps, fetch, result,
                                                      result_stride);
}

/* Whether a layer's input is bf16. */
INLINE int takes_bf16(const int is_bf16, const Linear *layer) { return is_bf16 && !layer->strips; }

/* How a finished panel is output: floats stored or added, or gate and up combined, to numbers or to
 * floats. */
typedef enum { STORE, ADD, GATE, GATE_FLOATS } Finish;

/* The adapters' share of some rows' outputs, added before a finish. */
typedef struct {
    const int64_t *places; /* of each row its index into `values`, or -1; NULL: no row has any */
    const float *values;   /* [.][stride] */
    int64_t stride;
} Added;

static const Added NOTHING_ADDED = {NULL, NULL, 0};

INLINE void finish_row(const int is_bf16, const Finish finish, const float *sums,
                       const Linear *layer, const Added *added, void *output, int64_t row,
                       int64_t stride, int64_t panel) {
    const int64_t place = added->places ? added->places[row] : -1;
    vf part[NV];
    for (int n = 0; n < NV; n++) {
        const int64_t at = panel * PANEL + n * VL;
        part[n] = v_load(sums + n * VL);
        if (layer->bias) part[n] = v_add(part[n], v_load(layer->bias + at));
        if (place >= 0)
            part[n] = v_add(part[n], v_load(added->values + place * added->stride + at));
    }
    if (finish >= GATE) {
        for (int n = 0; n < NV / 2; n++) {
            vf gate = part[n], up = part[n + NV / 2];
            vf e = v_exp(v_sub(v_set(0.0f), gate));
            vf joined = v_mul(v_div(gate, v_add(v_set(1.0f), e)), up);
            v_write(is_bf16 && finish == GATE, output,
                    row * stride + panel * (PANEL / 2) + n * VL, joined);
        }
        return;
    }
    for (int n = 0; n < NV; n++) {
        float *to = (float *)output + row * stride + panel * PANEL + n * VL;
        v_store(to, finish == ADD ? v_add(v_load(to), part[n]) : part[n]);
    }
}

/* Rows `first` to `end` times one panel of numbers. */
INLINE void plain_panel(const int is_bf16, const Finish finish, const Linear *layer,
                        const Added *added, const char *input, int64_t first, int64_t end,
                        void *output, int64_t stride, int64_t panel) {
    const int64_t row_bytes = layer->steps * 4;
    const char *weight = (const char *)layer->weight + panel * row_bytes * PANEL;
    for (int64_t row = first; row < end; row += MR) {
        float sums[MR * PANEL];
        const int64_t count = end - row < MR ? end - row : MR;
        const char *fetch = weight + (row == first ? AHEAD : row_bytes * PANEL);
        multiply(is_bf16, count, input + row * row_bytes, row_bytes, weight, layer->steps, fetch,
                 sums, PANEL);
        for (int64_t r = 0; r < count; r++)
            finish_row(is_bf16, finish, sums + r * PANEL, layer, added, output, row + r, stride,
                       panel);
    }
}

/* The same for a quantised panel. */
INLINE void quantised_panel(const int is_bf16, const Finish finish, const Linear *layer,
                            const Added *added, const Rounded *input, int64_t groups, int64_t first,
                            int64_t end, void *output, int64_t stride, int64_t panel) {
    float sums[GROUP_ROWS * PANEL];
    group_panel(layer, groups, input, first, end, panel, sums);
    for (int64_t row = first; row < end; row++)
        finish_row(is_bf16, finish, sums + (row - first) * PANEL, layer, added, output, row,
                   stride, panel);
}

/* Without an instruction for bf16 pairs, each use of a pair takes extra instructions to widen it.
 * So several rows are widened to floats once, and a panel piece by piece. */
INLINE void widen(const char *input, int64_t words, float *to) {
    for (int64_t i = 0; i < words; i++) {
        uint32_t pair, halves[2];
        memcpy(&pair, input + 4 * i, 4);
        halves[0] = pair & 0xffff0000u, halves[1] = pair << 16;
        memcpy(to + 2 * i, halves, 8);
    }
}

/* Rows `first` to `end`, widened, times one panel of bf16. */
INLINE void wide_panel(const Finish finish, const Linear *layer, const Added *added,
                       const float *input, int64_t first, int64_t end, void *output,
                       int64_t stride, int64_t panel) {
    const int64_t steps = 2 * layer->steps, width = 4 * VL;
    const char *weight = (const char *)layer->weight + panel * layer->steps * NV * width;
    float sums[PIECE_ROWS * PANEL], piece[PIECE * PANEL];
    memset(sums, 0, (end - first) * PANEL * 4);
    for (int64_t step = 0; step < steps; step += PIECE) {
        const int64_t some = steps - step < PIECE ? steps - step : PIECE;
        const char *from = weight + step / 2 * NV * width;
        for (int64_t i = 0; i < some / 2 * NV; i++) {
            float *to = piece + (i / NV * 2 * NV + i % NV) * VL;
            _mm_prefetch(from + i * width + AHEAD, _MM_HINT_T0);
            v_widen(v_load((const float *)(from + i * width)), to, to + PANEL);
        }
        for (int64_t row = first; row < end; row += MR)
            multiply_add(0, end - row < MR ? end - row : MR,
                         (const char *)(input + row * steps + step), steps * 4,
                         (const char *)piece, some, (const char *)piece,
                         sums + (row - first) * PANEL, PANEL);
    }
    for (int64_t row = first; row < end; row++)
        finish_row(1, finish, sums + (row - first) * PANEL, layer, added, output, row, stride,
                   panel);
}

/* Apply a linear layer to all rows of a step, divided among the threads of the enclosing region.
 * input: numbers [rows][steps words], but floats for a quantised layer; `room` holds them as
 * floats, or rounded. output: [rows][stride], floats, but numbers for GATE. */
INLINE void linear(const int is_bf16, const Finish finish, const Linear *layer,
                   const Added *added, const char *input, int64_t rows, char *room, void *output,
                   int64_t stride) {
    const int is_wide = WIDENS && is_bf16 && !layer->strips && rows >= WIDE_ROWS;
    const int64_t groups = layer->steps * (is_bf16 ? 2 : 1) / GROUP;
    const Rounded rounded = place_rounded(room, rows, groups);
    int64_t near = NEAR / (layer->steps * (is_wide ? 8 : 4)) / MR * MR;
    if (is_wide && near > PIECE_ROWS) near = PIECE_ROWS;
    if (near < MR) near = MR;
    if (layer->strips) near = GROUP_ROWS;
    const int64_t blocks = (rows + near - 1) / near;
    if (is_wide) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++)
            widen(input + row * layer->steps * 4, layer->steps,
                  (float *)room + row * layer->steps * 2);
    }
    if (layer->strips) {
#pragma omp for schedule(static)
        for (int64_t job = 0; job < rows * groups; job++)
            round_group((const float *)input + (job % rows * groups + job / rows) * GROUP,
                        rounded.quants + job * GROUP, rounded.about + job);
    }
    /* Neighbouring panels go to one thread, which has prefetched the next one. */
    int64_t chunk = layer->panels / (4 * omp_get_num_threads());
    if (chunk < 1) chunk = 1;
#pragma omp for schedule(dynamic, chunk)
    for (int64_t job = 0; job < blocks * layer->panels; job++) {
        const int64_t panel = job % layer->panels, first = job / layer->panels * near;
        const int64_t end = first + near < rows ? first + near : rows;
        if (layer->strips)
            quantised_panel(is_bf16, finish, layer, added, &rounded, groups, first, end, output,
                            stride, panel);
        else if (is_wide)
            wide_panel(finish, layer, added, (const float *)room, first, end, output, stride,
                       panel);
        else
            plain_panel(is_bf16, finish, layer, added, input, first, end, output, stride, panel);
    }
}

#endif
