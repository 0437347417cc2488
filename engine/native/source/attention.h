/* Causal attention over KV blocks where they lie.
 *
 * A task is some neighbouring positions of one sequence, and one key head with the query heads that
 * share it: at most TILE_ROWS rows. Keys come in tiles of TILE_KEYS absolute positions; each is
 * packed once for all rows, and each row keeps its own running maximum and sum. A row's arithmetic
 * is the same whichever rows are beside it: tiles that it does not see change nothing, and keys
 * that it does not see weigh exactly nothing. So chunks of any size, and decode, give the same bits.
 * Source: online softmax as in FlashAttention (Dao et al. 2022).
 */
#ifndef TRIOLET_ATTENTION_H
#define TRIOLET_ATTENTION_H

#include "product.h"

#define TILE_KEYS 64
#define TILE_ROWS 64
#define NOTHING -1e30f /* below every score, and still a number */
#define MAX_HEAD_DIM 256

/* Stands for tokens beyond the end: a former owner's NaN times a weight of zero would be NaN. */
static const float no_token[MAX_HEAD_DIM];

/* Where one thread keeps a tile. */
typedef struct {
    char *queries;  /* numbers [TILE_ROWS][head_dim] */
    char *keys;     /* panels of words: [TILE_KEYS / PANEL][words of head_dim][PANEL] */
    char *values;   /* panels of words: [panels of head_dim][words of TILE_KEYS][PANEL] */
    float *scores;  /* [TILE_ROWS][TILE_KEYS] */
    char *weights;  /* numbers [TILE_ROWS][TILE_KEYS] */
    float *sums;    /* [TILE_ROWS][panels of head_dim * PANEL] */
    float *largest; /* [TILE_ROWS] */
    float *total;   /* [TILE_ROWS] */
} Tile;

INLINE int64_t value_panels(const Model *model) { return (model->head_dim + PANEL - 1) / PANEL; }

/* Lay a tile out at `memory`; return the bytes that it takes. */
static int64_t place_tile(const Model *model, char *memory, Tile *tile) {
    const int64_t size = model->is_bf16 ? 2 : 4, wide = value_panels(model) * PANEL;
    char *next = memory;
    tile->queries = next, next += TILE_ROWS * model->head_dim * size;
    tile->keys = next, next += TILE_KEYS * model->head_dim * size;
    tile->values = next, next += TILE_KEYS * wide * size;
    tile->scores = (float *)next, next += TILE_ROWS * TILE_KEYS * 4;
    tile->weights = next, next += TILE_ROWS * TILE_KEYS * size;
    tile->sums = (float *)next, next += TILE_ROWS * wide * 4;
    tile->largest = (float *)next, next += TILE_ROWS * 4;
    tile->total = (float *)next, next += TILE_ROWS * 4;
    return (next - memory + 4095) / 4096 * 4096;
}

/* The bytes of one sequence's keys (or values) for one key head, position by position. */
typedef struct {
    const char *pool;
    const int64_t *blocks;
    int64_t block_size;
    int64_t block_bytes;
    int64_t token_bytes;
} Cache;

INLINE const char *cached(const Cache *cache, int64_t position) {
    return cache->pool + cache->blocks[position / cache->block_size] * cache->block_bytes +
           position % cache->block_size * cache->token_bytes;
}

/* Words of up to VL keys, turned: to[word][PANEL] = from[key][word]. */
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
    for (int64_t word = 0; word < words; word++)
#endif
        for (int i = 0; i < VL; i++)
            memcpy(to + word * PANEL + i, from[first + i] + word * 4, 4);
}

INLINE void pack_keys(const Model *model, const char *const *from, Tile *tile) {
    const int64_t words = model->head_dim * (model->is_bf16 ? 2 : 4) / 4;
    for (int64_t key = 0; key < TILE_KEYS; key += VL)
        turn(from, key, words,
             (float *)tile->keys + key / PANEL * words * PANEL + key % PANEL);
}

INLINE void pack_values(const int is_bf16, const Model *model, const char *const *from,
                        Tile *tile) {
    const int64_t words = TILE_KEYS * (is_bf16 ? 2 : 4) / 4;
    for (int64_t word = 0; word < words; word++) {
        const int64_t low = is_bf16 ? 2 * word : word, high = is_bf16 ? 2 * word + 1 : word;
        for (int64_t i = 0; i < model->head_dim; i += VL) {
            const vf packed = is_bf16 ? v_pairs((const uint16_t *)from[low] + i,
                                                (const uint16_t *)from[high] + i)
                                      : v_load((const float *)from[low] + i);
            v_store((float *)tile->values + (i / PANEL * words + word) * PANEL + i % PANEL, packed);
        }
    }
}

/* One row's scores become weights; returns the factor for what was summed before. */
INLINE float weigh(const int is_bf16, const float *scores, int64_t seen, void *weights, int64_t row,
                   float *largest, float *total) {
    vf parts[TILE_KEYS / VL], most = v_set(NOTHING), sum = v_set(0.0f);
    for (int i = 0; i < TILE_KEYS / VL; i++) {
        parts[i] = v_first(v_load(scores + i * VL), seen - i * VL, v_set(NOTHING));
        most = v_max(most, parts[i]);
    }
    const float before = *largest, now = v_largest(v_max(most, v_set(before)));
    for (int i = 0; i < TILE_KEYS / VL; i++) {
        vf weight = v_exp(v_sub(parts[i], v_set(now)));
        weight = v_first(weight, seen - i * VL, v_set(0.0f));
        sum = v_add(sum, weight);
        v_write(is_bf16, weights, row * TILE_KEYS + i * VL, weight);
    }
    float factor[VL];
    v_store(factor, v_exp(v_set(before - now)));
    *largest = now;
    *total = *total * factor[0] + v_sum(sum);
    return factor[0];
}

/* Add one tile of keys, from position `first` on, to all rows of a task. */
INLINE void attend_tile(const int is_bf16, const Model *model, const Task *task, int64_t first,
                        int64_t count, Tile *tile) {
    const int64_t group = model->num_heads / model->num_kv_heads, rows = task->count * group;
    const int64_t words = model->head_dim * (is_bf16 ? 2 : 4) / 4;
    const int64_t key_words = TILE_KEYS * (is_bf16 ? 2 : 4) / 4;
    const int64_t wide = value_panels(model) * PANEL;
    for (int64_t row = 0; row < rows; row += MR) {
        const int64_t some = rows - row < MR ? rows - row : MR;
        for (int64_t key = 0; key < count; key += PANEL)
            multiply(is_bf16, some, tile->queries + row * words * 4, words * 4,
                     tile->keys + key * words * 4, words, tile->scores + row * TILE_KEYS + key,
                     TILE_KEYS);
        for (int64_t r = row; r < row + some; r++) {
            const int64_t seen = task->position + r / group + 1 - first;
            const float factor = weigh(is_bf16, tile->scores + r * TILE_KEYS, seen, tile->weights,
                                       r, tile->largest + r, tile->total + r);
            if (factor != 1.0f)
                for (int64_t i = 0; i < wide; i += VL)
                    v_store(tile->sums + r * wide + i,
                            v_mul(v_load(tile->sums + r * wide + i), v_set(factor)));
        }
        for (int64_t i = 0; i < wide; i += PANEL)
            multiply_add(is_bf16, some, tile->weights + row * key_words * 4, key_words * 4,
                         tile->values + i * key_words * 4, key_words, tile->sums + row * wide + i,
                         wide);
    }
}

/* One task and one key head. queries, output: numbers [tokens][num_heads][head_dim]. */
INLINE void attend_task(const int is_bf16, const Model *model, int64_t layer, const Step *step,
                        const Task *task, int64_t kv_head, const char *queries, char *output,
                        Tile *tile) {
    const int64_t size = is_bf16 ? 2 : 4, group = model->num_heads / model->num_kv_heads;
    const int64_t head_bytes = model->head_dim * size, rows = task->count * group;
    const int64_t token_bytes = model->num_heads * head_bytes, wide = value_panels(model) * PANEL;
    const int64_t kv_bytes = model->block_size * model->num_kv_heads * head_bytes;
    Cache cache = {(const char *)model->pool + layer * 2 * kv_bytes + kv_head * head_bytes,
                   step->tables + task->table, model->block_size,
                   model->num_layers * 2 * kv_bytes, model->num_kv_heads * head_bytes};
    for (int64_t i = 0; i < task->count; i++)
        memcpy(tile->queries + i * group * head_bytes,
               queries + (task->token + i) * token_bytes + kv_head * group * head_bytes,
               group * head_bytes);
    memset(tile->sums, 0, rows * wide * 4);
    for (int64_t r = 0; r < rows; r++) tile->largest[r] = NOTHING, tile->total[r] = 0.0f;
    const int64_t end = task->position + task->count;
    for (int64_t first = 0; first < end; first += TILE_KEYS) {
        const int64_t count = end - first < TILE_KEYS ? end - first : TILE_KEYS;
        const char *from[TILE_KEYS];
        for (int64_t i = 0; i < TILE_KEYS; i++)
            from[i] = i < count ? cached(&cache, first + i) : (const char *)no_token;
        for (int64_t i = 0; i < TILE_KEYS && first + TILE_KEYS + i < end; i++) {
            const char *next = cached(&cache, first + TILE_KEYS + i);
            for (int64_t byte = 0; byte < head_bytes; byte += 64) {
                _mm_prefetch(next + byte, _MM_HINT_T0);
                _mm_prefetch(next + kv_bytes + byte, _MM_HINT_T0);
            }
        }
        pack_keys(model, from, tile);
        for (int64_t i = 0; i < TILE_KEYS; i++)
            from[i] = i < count ? from[i] + kv_bytes : (const char *)no_token;
        pack_values(is_bf16, model, from, tile);
        attend_tile(is_bf16, model, task, first, count, tile);
    }
    for (int64_t r = 0; r < rows; r++) {
        char *to = output + (task->token + r / group) * token_bytes +
                   (kv_head * group + r % group) * head_bytes;
        for (int64_t i = 0; i < model->head_dim; i += VL)
            v_write(is_bf16, to, i, v_div(v_load(tile->sums + r * wide + i),
                                          v_set(tile->total[r])));
    }
}

/* Tasks times key heads, shared among the threads of the enclosing region. */
INLINE void attend(const int is_bf16, const Model *model, int64_t layer, const Step *step,
                   const Task *tasks, int64_t num_tasks, const char *queries, char *output,
                   Tile *tile) {
#pragma omp for schedule(dynamic, 1)
    for (int64_t job = 0; job < num_tasks * model->num_kv_heads; job++)
        attend_task(is_bf16, model, layer, step, tasks + job / model->num_kv_heads,
                    job % model->num_kv_heads, queries, output, tile);
}

#endif
