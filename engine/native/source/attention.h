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
#include "turn.h"

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

/* Where `count` neighbouring positions lie. */
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

/* Words that hold the weights, or the values, of so many keys. */
INLINE int64_t key_words(const int is_bf16, int64_t count) {
    return is_bf16 ? (count + 1) / 2 : count;
}

/* Of a tile's keys only the first `count` are packed; what the rest of a vector then holds is masked
 * where scores become weights. */
INLINE void pack_keys(const Model *model, const char *const *from, int64_t count, Tile *tile) {
    const int64_t words = model->head_dim * (model->is_bf16 ? 2 : 4) / 4;
    for (int64_t key = 0; key < count; key += VL)
        turn(from, key, words,
             (float *)tile->keys + key / PANEL * words * PANEL + key % PANEL);
}

/* The same of values. Those missing in the last word are zeros, as their weights are. */
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

/* One row's scores become weights; returns the factor for what was summed before. */
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

/* The next tile's tokens, which are fetched into the cache piece by piece meanwhile. */
typedef struct {
    const char *const *tokens;
    int64_t count;
    int64_t token_bytes; /* of a job's key heads */
    int64_t kv_bytes;    /* from a token's keys to its values */
    int64_t done;        /* bytes */
} Fetch;

/* Where the next piece lies. Tokens of a block are neighbours, so a piece mostly is in one; what is
 * missed at the borders comes a little later. */
INLINE const char *next_piece(Fetch *fetch, int64_t bytes) {
    const int64_t all = fetch->count * fetch->token_bytes, at = fetch->done;
    if (at >= 2 * all) return (const char *)no_token;
    fetch->done += bytes;
    return at < all ? fetch->tokens[at / fetch->token_bytes]
                    : fetch->tokens[(at - all) / fetch->token_bytes] + fetch->kv_bytes;
}

/* Add one tile of keys, from position `first` on, to a task's rows of one key head, which begin at
 * `begin` in the tile. */
INLINE void attend_tile(const int is_bf16, const Model *model, const Task *task, int64_t first,
                        int64_t count, int64_t begin, Fetch *fetch, Tile *tile) {
    const int64_t group = model->num_heads / model->num_kv_heads;
    const int64_t words = model->head_dim * (is_bf16 ? 2 : 4) / 4, end = begin + task->count * group;
    const int64_t most_words = TILE_KEYS * (is_bf16 ? 2 : 4) / 4;
    const int64_t seen_words = key_words(is_bf16, count);
    const int64_t wide = value_panels(model) * PANEL;
    for (int64_t row = begin; row < end; row += MR) {
        const int64_t some = end - row < MR ? end - row : MR;
        for (int64_t key = 0; key < count; key += PANEL)
            multiply(is_bf16, some, tile->queries + row * words * 4, words * 4,
                     tile->keys + key * words * 4, words, next_piece(fetch, words * PANEL * 4),
                     tile->scores + row * TILE_KEYS + key, TILE_KEYS);
        for (int64_t r = row; r < row + some; r++) {
            const int64_t seen = task->position + (r - begin) / group + 1 - first;
            const float factor = weigh(is_bf16, tile->scores + r * TILE_KEYS, seen, tile->weights,
                                       r, tile->largest + r, tile->total + r);
            if (factor != 1.0f)
                for (int64_t i = 0; i < wide; i += VL)
                    v_store(tile->sums + r * wide + i,
                            v_mul(v_load(tile->sums + r * wide + i), v_set(factor)));
        }
        for (int64_t i = 0; i < wide; i += PANEL)
            multiply_add(is_bf16, some, tile->weights + row * most_words * 4, most_words * 4,
                         tile->values + i * most_words * 4, seen_words,
                         next_piece(fetch, seen_words * PANEL * 4), tile->sums + row * wide + i,
                         wide);
    }
}

/* What one thread does at a time: a task, and key heads `head` to `head + heads`. */
typedef struct {
    const Model *model;
    const Task *task;
    int64_t head;
    int64_t heads;
    Cache cache;
} Job;

/* Go through the keys of a job's sequence. The queries are in the tile. */
INLINE void attend_keys(const int is_bf16, const Job *job, Tile *tile) {
    const Model *model = job->model;
    const int64_t head_bytes = model->head_dim * (is_bf16 ? 2 : 4);
    const int64_t kv_bytes = model->block_size * job->cache.token_bytes;
    const int64_t end = job->task->position + job->task->count;
    const int64_t rows = job->task->count * (model->num_heads / model->num_kv_heads);
    const char *next[TILE_KEYS], *here[TILE_KEYS], *from[TILE_KEYS];
    int64_t num_next = end < TILE_KEYS ? end : TILE_KEYS;
    locate(&job->cache, 0, num_next, next);
    for (int64_t first = 0; first < end; first += TILE_KEYS) {
        const int64_t count = num_next;
        memcpy(here, next, sizeof here);
        num_next = end - first - count < TILE_KEYS ? end - first - count : TILE_KEYS;
        locate(&job->cache, first + count, num_next, next);
        Fetch fetch = {next, num_next, job->heads * head_bytes, kv_bytes, 0};
        for (int64_t head = 0; head < job->heads; head++) {
            for (int64_t i = 0; i < TILE_KEYS; i++)
                from[i] = i < count ? here[i] + head * head_bytes : (const char *)no_token;
            pack_keys(model, from, count, tile);
            for (int64_t i = 0; i < count; i++) from[i] += kv_bytes;
            pack_values(is_bf16, model, from, count, tile);
            attend_tile(is_bf16, model, job->task, first, count, head * rows, &fetch, tile);
        }
    }
}

/* queries, output: numbers [tokens][num_heads][head_dim]. */
INLINE void attend_job(const int is_bf16, const Job *job, const char *queries, char *output,
                       Tile *tile) {
    const Model *model = job->model;
    const int64_t dim = model->head_dim, group = model->num_heads / model->num_kv_heads;
    const int64_t head_bytes = dim * (is_bf16 ? 2 : 4), wide = value_panels(model) * PANEL;
    const int64_t rows = job->heads * job->task->count * group;
    /* Row r of the tile: head r / (count * group) of the job, then position, then query head. */
    int64_t places[TILE_ROWS];
    for (int64_t r = 0; r < rows; r++) {
        const int64_t head = job->head + r / (job->task->count * group);
        const int64_t token = job->task->token + r / group % job->task->count;
        places[r] = (token * model->num_heads + head * group + r % group) * head_bytes;
        memcpy(tile->queries + r * head_bytes, queries + places[r], head_bytes);
        tile->largest[r] = NOTHING;
        tile->total[r] = 0.0f;
    }
    memset(tile->sums, 0, rows * wide * 4);
    attend_keys(is_bf16, job, tile);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < dim; i += VL)
            v_write(is_bf16, output + places[r], i,
                    v_div(v_load(tile->sums + r * wide + i), v_set(tile->total[r])));
}

/* How many key heads a job takes. All of them if possible, for then memory is read in one piece;
 * fewer where a tile holds no more rows, or threads would have nothing to do. */
INLINE int64_t heads_per_job(const Model *model, int64_t num_tasks, int64_t most_tokens,
                             int64_t threads) {
    const int64_t rows = most_tokens * (model->num_heads / model->num_kv_heads);
    int64_t heads = model->num_kv_heads;
    while (heads > 1 && (heads * rows > TILE_ROWS || model->num_kv_heads % heads ||
                         num_tasks * (model->num_kv_heads / heads) < threads))
        heads--;
    return heads;
}

/* Tasks times key heads, shared among the threads of the enclosing region. */
INLINE void attend(const int is_bf16, const Model *model, int64_t layer, const Step *step,
                   const Task *tasks, int64_t num_tasks, int64_t most_tokens, int64_t threads,
                   const char *queries, char *output, Tile *tile) {
    const int64_t head_bytes = model->head_dim * (is_bf16 ? 2 : 4);
    const int64_t token_bytes = model->num_kv_heads * head_bytes;
    const int64_t kv_bytes = model->block_size * token_bytes;
    const int64_t heads = heads_per_job(model, num_tasks, most_tokens, threads);
    const int64_t per_task = model->num_kv_heads / heads;
#pragma omp for schedule(dynamic, 1)
    for (int64_t index = 0; index < num_tasks * per_task; index++) {
        const Task *task = tasks + index / per_task;
        Job job = {model, task, index % per_task * heads, heads,
                   {(const char *)model->pool + layer * 2 * kv_bytes +
                        index % per_task * heads * head_bytes,
                    step->tables + task->table, model->block_size,
                    model->num_layers * 2 * kv_bytes, token_bytes}};
        attend_job(is_bf16, &job, queries, output, tile);
    }
}

#endif
