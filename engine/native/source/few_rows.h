/* Attention for few rows, as in decode: the query heads that share a key head, and speculated
 * tokens.
 *
 * With few rows the products of a tile take less time than packing it, and one panel's sums are too
 * few to keep the core busy. So values are read in place, and several panels are summed at a time.
 * Sums have the order of product.h, so the bits are the same.
 */
#ifndef TRIOLET_FEW_ROWS_H
#define TRIOLET_FEW_ROWS_H

#include "tile.h"

#if VL == 16

#define TILE_PANELS 2

_Static_assert(TILE_KEYS == TILE_PANELS * PANEL, "score_rows takes a tile at once");

/* Few rows times the keys of a tile. Keys that are not packed are masked later, in the softmax. */
INLINE void score_rows(const int is_bf16, const int rows, const char *queries, const char *keys,
                       int64_t words, int64_t count, Fetch *fetch, float *scores) {
    (void)count; /* the whole tile at once */
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
INLINE void add_panels(const int is_bf16, const int rows, const char *weights,
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

/* The same for all numbers of a head. */
INLINE void add_values(const int is_bf16, const int rows, const char *weights,
                       const char *const *values, int64_t words, Fetch *fetch, float *to,
                       int64_t dim) {
    for (int64_t at = 0; at < dim; at += TILE_PANELS * PANEL)
        add_panels(is_bf16, rows, weights, values, words, at, fetch, to + at, dim);
}

#else

/* Vectors of sums kept in registers: eight or more keep the core busy, and columns need some of the
 * 16 registers. */
#define ACROSS(rows) ((rows) == 1 ? 8 : (rows) <= 3 ? 4 : 2)

typedef vf Sums[FEW_ROWS][ACROSS(1)];

/* Add rows of factors, `stride` floats apart, times the columns of one number. */
INLINE void add_columns(const int rows, const float *factors, int64_t stride, const vf *columns,
                        Sums sums) {
    const int across = ACROSS(rows);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int n = 0; n < across; n++)
            sums[r][n] = v_fma(v_set(factors[r * stride]), columns[n], sums[r][n]);
}

/* Numbers as floats: in place if they are floats already, else converted to `to`. */
INLINE const float *as_floats(const int is_bf16, const char *numbers, int64_t count, float *to) {
    if (!is_bf16) return (const float *)numbers;
    for (int64_t i = 0; i < count; i += VL) v_store(to + i, v_read(1, numbers, i));
    return to;
}

/* Few rows times the keys of a tile. */
INLINE void score_rows(const int is_bf16, const int rows, const char *queries, const char *keys,
                       int64_t words, int64_t count, Fetch *fetch, float *scores) {
    const int across = ACROSS(rows);
    const int64_t per_word = is_bf16 ? 2 : 1, dim = words * per_word;
    float room[FEW_ROWS * MAX_HEAD_DIM];
    const float *factors = as_floats(is_bf16, queries, rows * dim, room);
    for (int64_t key = 0; key < count; key += across * VL) {
        const char *fetched[ACROSS(1) / NV];
        for (int n = 0; n < across / NV; n++)
            fetched[n] = next_piece(fetch, words * PANEL * 4);
        Sums sums;
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int n = 0; n < across; n++) sums[r][n] = v_set(0.0f);
        for (int64_t word = 0; word < words; word++) {
            vf columns[ACROSS(1)];
            const float *panel = (const float *)keys + (key / PANEL * words + word) * PANEL;
#pragma GCC unroll 4
            for (int n = 0; n < across / NV; n++)
                _mm_prefetch(fetched[n] + word * PANEL * 4, _MM_HINT_T0);
#pragma GCC unroll 2
            for (int64_t half = per_word - 1; half >= 0; half--) {
#pragma GCC unroll 8
                for (int n = 0; n < across; n++) {
                    const vf pair = v_load(panel + n / NV * words * PANEL + n % NV * VL);
                    columns[n] = !is_bf16 ? pair : half ? v_odd(pair) : v_even(pair);
                }
                add_columns(rows, factors + word * per_word + half, dim, columns, sums);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int n = 0; n < across; n++)
                v_store(scores + r * TILE_KEYS + key + n * VL, sums[r][n]);
    }
}

/* Few rows of weights times values, all numbers of a head. */
INLINE void add_values(const int is_bf16, const int rows, const char *weights,
                       const char *const *values, int64_t words, Fetch *fetch, float *to,
                       int64_t dim) {
    const int across = ACROSS(rows);
    const int64_t per_word = is_bf16 ? 2 : 1;
    float room[FEW_ROWS * TILE_KEYS];
    const float *factors = as_floats(is_bf16, weights, rows * TILE_KEYS, room);
    for (int64_t at = 0; at < dim; at += across * VL) {
        const char *fetched[ACROSS(1) / NV];
        for (int n = 0; n < across / NV; n++)
            fetched[n] = next_piece(fetch, words * PANEL * 4);
        Sums sums;
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int n = 0; n < across; n++) sums[r][n] = v_load(to + r * dim + at + n * VL);
        for (int64_t word = 0; word < words; word++) {
            vf columns[ACROSS(1)];
#pragma GCC unroll 4
            for (int n = 0; n < across / NV; n++)
                _mm_prefetch(fetched[n] + word * PANEL * 4, _MM_HINT_T0);
#pragma GCC unroll 2
            for (int64_t key = (word + 1) * per_word - 1; key >= word * per_word; key--) {
#pragma GCC unroll 8
                for (int n = 0; n < across; n++)
                    columns[n] = v_read(is_bf16, values[key], at + n * VL);
                add_columns(rows, factors + key, TILE_KEYS, columns, sums);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int n = 0; n < across; n++) v_store(to + r * dim + at + n * VL, sums[r][n]);
    }
}

#endif

/* Add one tile of keys, starting at position `first`, to a task's rows of one key head, which start
 * at `begin` in the tile. The values are not packed. */
INLINE void attend_rows(const int is_bf16, const int rows, const Model *model, const Task *task,
                        int64_t first, int64_t count, int64_t begin, const char *const *values,
                        Fetch *fetch, Tile *tile) {
    const int64_t group = model->num_heads / model->num_kv_heads, dim = model->head_dim;
    const int64_t size = is_bf16 ? 2 : 4, words = dim * size / 4;
    score_rows(is_bf16, rows, tile->queries + begin * words * 4, tile->keys, words, count, fetch,
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
    add_values(is_bf16, rows, tile->weights + begin * TILE_KEYS * size, values,
               key_words(is_bf16, count), fetch, tile->sums + begin * dim, dim);
}

/* Whether a job has few enough rows, and heads of whole panels. */
INLINE int are_few(const Model *model, int64_t rows) {
    return rows <= FEW_ROWS && model->head_dim % TILE_KEYS == 0;
}

#define FEW(n)                                                                                    \
    case n:                                                                                       \
        attend_rows(is_bf16, n, model, task, first, count, begin, values, fetch, tile);           \
        break;
#if FEW_ROWS > 4
#define FEW_MORE FEW(5) FEW(6)
#else
#define FEW_MORE
#endif
#define DEFINE_ATTEND_FEW(name, bf16)                                                             \
    static void name(int64_t rows, const Model *model, const Task *task, int64_t first,           \
                     int64_t count, int64_t begin, const char *const *values, Fetch *fetch,       \
                     Tile *tile) {                                                                \
        const int is_bf16 = bf16;                                                                 \
        switch (rows) { FEW(1) FEW(2) FEW(3) FEW(4) FEW_MORE }                                    \
    }
DEFINE_ATTEND_FEW(attend_few_bf16, 1)
DEFINE_ATTEND_FEW(attend_few_f32, 0)

INLINE void attend_few(const int is_bf16, int64_t rows, const Model *model, const Task *task,
                       int64_t first, int64_t count, int64_t begin, const char *const *values,
                       Fetch *fetch, Tile *tile) {
    (is_bf16 ? attend_few_bf16 : attend_few_f32)(rows, model, task, first, count, begin, values,
                                                 fetch, tile);
}

#endif
