/* A tile of keys and values: its buffer per thread, packing from the pool's blocks, and the softmax
 * of one row's scores.
 */
#ifndef TRIOLET_TILE_H
#define TRIOLET_TILE_H

#include "product.h"
#include "turn.h"

#define TILE_KEYS 64
#define TILE_ROWS 64
#define NOTHING -1e30f /* below every score, and still a number */
#define MAX_HEAD_DIM 256

/* Replaces tokens beyond the end: a former owner's NaN times a weight of 0 would be NaN. */
static const float no_token[MAX_HEAD_DIM];

/* One thread's buffers of a tile. */
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

/* Place a tile's buffers at `memory`; returns their size in bytes. */
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

/* Address of `count` neighbouring positions. */
INLINE void locate(const Cache *cache, int64_t first, int64_t count, const char **to) {
    const int64_t *block = cache->blocks + first / cache->block_size;
    int64_t offset = first % cache->block_size;
    for (int64_t i = 0; i < count; block++, offset = 0) {
        const char *token = cache->pool + *block * cache->block_bytes + offset * cache->token_bytes;
        for (; i < count && offset < cache->block_size; i++, offset++) {
            to[i] = token;
            token += cache->token_bytes;
        }
    }
}

/* Words for the weights or values of `count` keys. */
INLINE int64_t key_words(const int is_bf16, int64_t count) {
    return is_bf16 ? (count + 1) / 2 : count;
}

/* Pack the first `count` keys of a tile. The rest of a vector is masked later, in the softmax. */
INLINE void pack_keys(const Model *model, const char *const *from, int64_t count, Tile *tile) {
    const int64_t words = model->head_dim * (model->is_bf16 ? 2 : 4) / 4;
    for (int64_t key = 0; key < count; key += VL)
        turn(from, key, words,
             (float *)tile->keys + key / PANEL * words * PANEL + key % PANEL);
}

/* The same for values. Missing ones in the last word are zeros, like their weights. */
INLINE void pack_values(const int is_bf16, const Model *model, const char *const *from,
                        int64_t count, Tile *tile) {
    const int64_t words = TILE_KEYS * (is_bf16 ? 2 : 4) / 4;
    for (int64_t word = 0; word < key_words(is_bf16, count); word++) {
        const int64_t low = is_bf16 ? 2 * word : word, high = is_bf16 ? 2 * word + 1 : word;
        for (int64_t i = 0; i < model->head_dim; i += VL) {
            const vf packed = is_bf16 ? v_pairs((const uint16_t *)from[low] + i,
                                                (const uint16_t *)from[high] + i)
                                      : v_load((const float *)from[low] + i);
            v_store((float *)tile->values + (i / PANEL * words + word) * PANEL + i % PANEL, packed);
        }
    }
}

/* Turn one row's scores into weights; returns the factor for earlier sums. */
INLINE float weigh(const int is_bf16, const float *scores, int64_t seen, void *weights, int64_t row,
                   float *largest, float *total) {
    vf parts[TILE_KEYS / VL], most = v_set(NOTHING), sums[PARTS];
    for (int i = 0; i < PARTS; i++) sums[i] = v_set(0.0f);
    for (int i = 0; i < TILE_KEYS / VL; i++) {
        parts[i] = v_first(v_load(scores + i * VL), seen - i * VL, v_set(NOTHING));
        most = v_max(most, parts[i]);
    }
    const float before = *largest, now = v_largest(v_max(most, v_set(before)));
    for (int i = 0; i < TILE_KEYS / VL; i++) {
        vf weight = v_exp(v_sub(parts[i], v_set(now)));
        weight = v_first(weight, seen - i * VL, v_set(0.0f));
        sums[i % PARTS] = v_add(sums[i % PARTS], weight);
        v_write(is_bf16, weights, row * TILE_KEYS + i * VL, weight);
    }
    float factor[VL];
    v_store(factor, v_exp(v_set(before - now)));
    *largest = now;
    *total = *total * factor[0] + v_total(sums);
    return factor[0];
}

/* The next tile's tokens, prefetched into the cache piece by piece. */
typedef struct {
    const char *const *tokens;
    int64_t count;
    int64_t token_bytes; /* of a job's key heads */
    int64_t kv_bytes;    /* from a token's keys to its values */
    int64_t done;        /* bytes */
} Fetch;

/* Address of the next piece to prefetch. Tokens of a block are contiguous, so a piece is mostly
 * within one; bytes missed at block borders are loaded on use. */
INLINE const char *next_piece(Fetch *fetch, int64_t bytes) {
    const int64_t all = fetch->count * fetch->token_bytes, at = fetch->done;
    if (at >= 2 * all) return (const char *)no_token;
    fetch->done += bytes;
    return at < all ? fetch->tokens[at / fetch->token_bytes]
                    : fetch->tokens[(at - all) / fetch->token_bytes] + fetch->kv_bytes;
}

#endif
