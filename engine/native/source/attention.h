/* Causal attention over KV blocks in place.
 *
 * A task is a range of positions of one sequence, with one key head and the query heads that share
 * it: at most TILE_ROWS rows. Keys are read in tiles of TILE_KEYS absolute positions. A tile is
 * packed once for all rows, and each row has its own running maximum and sum. A row's arithmetic
 * does not depend on the other rows: masked tiles change nothing, and masked keys have weight 0. So
 * chunks of any size, and decode, give the same bits.
 * Source: online softmax as in FlashAttention (Dao et al. 2022).
 */
#ifndef TRIOLET_ATTENTION_H
#define TRIOLET_ATTENTION_H

#include "few_rows.h"

/* Add one tile of keys, starting at position `first`, to a task's rows of one key head, which start
 * at `begin` in the tile. */
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

/* One thread's unit of work: a task, and key heads `head` to `head + heads`. */
typedef struct {
    const Model *model;
    const Task *task;
    int64_t head;
    int64_t heads;
    Cache cache;
} Job;

/* Attend to all keys of a job's sequence. The queries are in the tile. */
INLINE void attend_keys(const int is_bf16, const Job *job, Tile *tile) {
    const Model *model = job->model;
    const int64_t head_bytes = model->head_dim * (is_bf16 ? 2 : 4);
    const int64_t kv_bytes = model->block_size * job->cache.token_bytes;
    const int64_t end = job->task->position + job->task->count;
    const int64_t rows = job->task->count * (model->num_heads / model->num_kv_heads);
    const char *next[TILE_KEYS], *here[TILE_KEYS], *from[TILE_KEYS];
    const int is_few = are_few(model, rows);
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
            if (is_few) {
                attend_few(is_bf16, rows, model, job->task, first, count, head * rows, from, &fetch,
                           tile);
                continue;
            }
            pack_values(is_bf16, model, from, count, tile);
            attend_tile(is_bf16, model, job->task, first, count, head * rows, &fetch, tile);
        }
    }
}

/* queries: numbers [tokens][num_heads][head_dim]; output: the same, but floats unless `to_bf16`. */
INLINE void attend_job(const int is_bf16, const int to_bf16, const Job *job, const char *queries,
                       char *output, Tile *tile) {
    const Model *model = job->model;
    const int64_t dim = model->head_dim, group = model->num_heads / model->num_kv_heads;
    const int64_t head_bytes = dim * (is_bf16 ? 2 : 4), wide = value_panels(model) * PANEL;
    const int64_t rows = job->heads * job->task->count * group;
    /* Row r of the tile: head r / (count * group) of the job, then position, then query head. */
    int64_t places[TILE_ROWS];
    for (int64_t r = 0; r < rows; r++) {
        const int64_t head = job->head + r / (job->task->count * group);
        const int64_t token = job->task->token + r / group % job->task->count;
        places[r] = token * model->num_heads + head * group + r % group;
        memcpy(tile->queries + r * head_bytes, queries + places[r] * head_bytes, head_bytes);
        tile->largest[r] = NOTHING;
        tile->total[r] = 0.0f;
    }
    memset(tile->sums, 0, rows * wide * 4);
    attend_keys(is_bf16, job, tile);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < dim; i += VL)
            v_write(to_bf16, output, places[r] * dim + i,
                    v_div(v_load(tile->sums + r * wide + i), v_set(tile->total[r])));
}

/* Key heads per job. All of them if possible, so that memory is read sequentially; fewer if the
 * tile does not hold the rows, or if threads would be idle. */
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
INLINE void attend(const int is_bf16, const int to_bf16, const Model *model, int64_t layer,
                   const Step *step, const Task *tasks, int64_t num_tasks, int64_t most_tokens,
                   int64_t threads, const char *queries, char *output, Tile *tile) {
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
        attend_job(is_bf16, to_bf16, &job, queries, output, tile);
    }
}

#endif
