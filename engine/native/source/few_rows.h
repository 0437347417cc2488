/* Attention of few rows, as decode has them: the query heads that share a key head, and guesses.
 *
 * The products of a tile then take less time than packing it, and one panel's sums are too few to
 * keep the core busy. So values are read where they lie, and as many panels are summed at a time as
 * a tile has keys for. The order of every sum is that of product.h: the bits are the same.
 */
#ifndef TRIOLET_FEW_ROWS_H
#define TRIOLET_FEW_ROWS_H

#include "tile.h"

#if FEW_ROWS

#define TILE_PANELS 2

_Static_assert(TILE_KEYS == TILE_PANELS * PANEL, "score_rows takes a tile at once");

/* Few rows times the keys of a tile. What is not packed of them is masked where scores become
 * weights. */
INLINE void score_rows(const int is_bf16, const int rows, const char *queries, const char *keys,
                       int64_t words, Fetch *fetch, float *scores) {
    const char *fetched[TILE_PANELS];
    for (int n = 0; n < TILE_PANELS; n++) fetched[n] = next_piece(fetch, words * PANEL * 4);
    vf sums[FEW_ROWS][TILE_PANELS * NV];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int n = 0; n < TILE_PANELS * NV; n++) sums[r][n] = v_set(0.0f);
    for (int64_t word = 0; word < words; word++) {
        vf columns[TILE_PANELS * NV];
#pragma GCC unroll 4
        for (int n = 0; n < TILE_PANELS * NV; n++) {
            const float *panel = (const float *)keys + (n / NV * words + word) * PANEL;
            columns[n] = v_load(panel + n % NV * VL);
            _mm_prefetch(fetched[n / NV] + (word * NV + n % NV) * VL * 4, _MM_HINT_T0);
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const vf factor = v_repeat(queries + (r * words + word) * 4);
#pragma GCC unroll 4
            for (int n = 0; n < TILE_PANELS * NV; n++)
                sums[r][n] = v_step(is_bf16, sums[r][n], factor, columns[n]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int n = 0; n < TILE_PANELS * NV; n++)
            v_store(scores + r * TILE_KEYS + n * VL, sums[r][n]);
}

/* Few rows of weights times TILE_PANELS panels of values, from number `at` of each token on. */
INLINE void add_values(const int is_bf16, const int rows, const char *weights,
                       const char *const *values, int64_t words, int64_t at, Fetch *fetch,
                       float *to, int64_t wide) {
    const char *fetched[TILE_PANELS];
    for (int n = 0; n < TILE_PANELS; n++) fetched[n] = next_piece(fetch, words * PANEL * 4);
    vf sums[FEW_ROWS][TILE_PANELS * NV];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int n = 0; n < TILE_PANELS * NV; n++) sums[r][n] = v_load(to + r * wide + n * VL);
    for (int64_t word = 0; word < words; word++) {
        vf columns[TILE_PANELS * NV];
#pragma GCC unroll 4
        for (int n = 0; n < TILE_PANELS * NV; n++)
            _mm_prefetch(fetched[n / NV] + (word * NV + n % NV) * VL * 4, _MM_HINT_T0);
        if (is_bf16) {
            const uint16_t *low = (const uint16_t *)values[2 * word] + at;
            const uint16_t *high = (const uint16_t *)values[2 * word + 1] + at;
            v_pairs_twice(low, high, columns);
            v_pairs_twice(low + 2 * VL, high + 2 * VL, columns + 2);
        } else {
#pragma GCC unroll 4
            for (int n = 0; n < TILE_PANELS * NV; n++)
                columns[n] = v_load((const float *)values[word] + at + n * VL);
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const vf factor = v_repeat(weights + (r * TILE_KEYS * (is_bf16 ? 2 : 4)) + word * 4);
#pragma GCC unroll 4
            for (int n = 0; n < TILE_PANELS * NV; n++)
                sums[r][n] = v_step(is_bf16, sums[r][n], factor, columns[n]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int n = 0; n < TILE_PANELS * NV; n++) v_store(to + r * wide + n * VL, sums[r][n]);
}

/* Add one tile of keys, from position `first` on, to a task's rows of one key head, which begin at
 * `begin` in the tile. The values are not packed. */
INLINE void attend_rows(const int is_bf16, const int rows, const Model *model, const Task *task,
                        int64_t first, int64_t count, int64_t begin, const char *const *values,
                        Fetch *fetch, Tile *tile) {
    const int64_t group = model->num_heads / model->num_kv_heads, dim = model->head_dim;
    const int64_t size = is_bf16 ? 2 : 4, words = dim * size / 4;
    score_rows(is_bf16, rows, tile->queries + begin * words * 4, tile->keys, words, fetch,
               tile->scores + begin * TILE_KEYS);
    for (int64_t r = begin; r < begin + rows; r++) {
        const int64_t seen = task->position + (r - begin) / group + 1 - first;
        const float factor = weigh(is_bf16, tile->scores + r * TILE_KEYS, seen, tile->weights, r,
                                   tile->largest + r, tile->total + r);
        if (factor != 1.0f)
            for (int64_t i = 0; i < dim; i += VL)
                v_store(tile->sums + r * dim + i,
                        v_mul(v_load(tile->sums + r * dim + i), v_set(factor)));
    }
    for (int64_t i = 0; i < dim; i += TILE_PANELS * PANEL)
        add_values(is_bf16, rows, tile->weights + begin * TILE_KEYS * size, values,
                   key_words(is_bf16, count), i, fetch, tile->sums + begin * dim + i, dim);
}

/* Whether a job's rows are few enough, and its heads whole panels. */
INLINE int are_few(const Model *model, int64_t rows) {
    return rows <= FEW_ROWS && model->head_dim % (TILE_PANELS * PANEL) == 0;
}

#define FEW(n)                                                                                    \
    case n:                                                                                       \
        attend_rows(is_bf16, n, model, task, first, count, begin, values, fetch, tile);           \
        break;
#define DEFINE_ATTEND_FEW(name, bf16)                                                             \
    static void name(int64_t rows, const Model *model, const Task *task, int64_t first,           \
                     int64_t count, int64_t begin, const char *const *values, Fetch *fetch,       \
                     Tile *tile) {                                                                \
        const int is_bf16 = bf16;                                                                 \
        switch (rows) { FEW(1) FEW(2) FEW(3) FEW(4) FEW(5) FEW(6) }                               \
    }
DEFINE_ATTEND_FEW(attend_few_bf16, 1)
DEFINE_ATTEND_FEW(attend_few_f32, 0)

INLINE void attend_few(const int is_bf16, int64_t rows, const Model *model, const Task *task,
                       int64_t first, int64_t count, int64_t begin, const char *const *values,
                       Fetch *fetch, Tile *tile) {
    (is_bf16 ? attend_few_bf16 : attend_few_f32)(rows, model, task, first, count, begin, values,
                                                 fetch, tile);
}

#else

INLINE int are_few(const Model *model, int64_t rows) {
    (void)model, (void)rows;
    return 0;
}
INLINE void attend_few(const int is_bf16, int64_t rows, const Model *model, const Task *task,
                       int64_t first, int64_t count, int64_t begin, const char *const *values,
                       Fetch *fetch, Tile *tile) {
    (void)is_bf16, (void)rows, (void)model, (void)task, (void)first, (void)count, (void)begin;
    (void)values, (void)fetch, (void)tile;
}

#endif

#endif
