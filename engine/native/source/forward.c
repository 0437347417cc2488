/* Compute a whole step of a Llama-family transformer in one call: from token ids to logits.
 *
 * One call, because returning to the interpreter between the operations of a decode step would take
 * too long. The residual stream, scores, sums and inputs of quantised products are floats; inputs
 * of other products, and KV, have the model's dtype. Compiled once per instruction set;
 * `triolet_runs_here` returns whether this machine supports it. Not linked to an OpenMP runtime: it
 * uses the one that torch has loaded, so that idle threads of two pools never spin against each
 * other.
 */
#include <math.h>
#include <omp.h>
#include <stddef.h>

#include "attention.h"
#include "group_packing.h"
#include "limits.h"
#include "low_rank.h"
#include "packing.h"

#define ALIGNED(bytes) (((bytes) + 63) / 64 * 64)

/* Pointers to the activations of a step. */
typedef struct {
    float *hidden;   /* [tokens][hidden_stride], the residual stream */
    float *heads;    /* [tokens][heads_stride], query, key and value before rotation */
    char *normed;    /* inputs of qkv, gate_up or lm_head [tokens][hidden_size] */
    char *queries;   /* numbers [tokens][num_heads][head_dim], scaled */
    char *attended;  /* inputs of output [tokens][num_heads][head_dim] */
    char *joined;    /* inputs of down [tokens][.] */
    char *room;      /* for the input of a linear layer as floats, or rounded */
    char *tiles;     /* one for each thread */
    LowRows low;     /* of rows with adapters */
    int64_t hidden_stride;
    int64_t heads_stride;
    int64_t joined_stride;
} Buffers;

static int64_t place_buffers(const Model *model, int64_t tokens, int64_t adapted, int64_t threads,
                             char *memory, Buffers *to) {
    const Layer *layer = &model->layers[0];
    const int64_t size = model->is_bf16 ? 2 : 4;
    const int64_t heads = tokens * model->num_heads * model->head_dim;
    Tile tile;
    to->hidden_stride = layer->output.panels * PANEL;
    to->heads_stride = layer->qkv.panels * PANEL;
    to->joined_stride = layer->gate_up.panels * PANEL / 2;
    char *next = memory;
    to->hidden = (float *)next, next += ALIGNED(tokens * to->hidden_stride * 4);
    to->heads = (float *)next, next += ALIGNED(tokens * to->heads_stride * 4);
    to->normed = next, next += ALIGNED(tokens * model->hidden_size * 4);
    to->queries = next, next += ALIGNED(heads * size);
    to->attended = next, next += ALIGNED(heads * 4);
    to->joined = next, next += ALIGNED(tokens * to->joined_stride * 4);
    int64_t input = layer->qkv.steps, output = to->hidden_stride;
    if (input < layer->output.steps) input = layer->output.steps;
    if (input < layer->down.steps) input = layer->down.steps;
    if (output < to->heads_stride) output = to->heads_stride;
    if (output < 2 * to->joined_stride) output = 2 * to->joined_stride;
    to->low.input = next, next += ALIGNED(adapted * input * 4);
    to->low.low = next, next += ALIGNED(adapted * model->low_stride * size);
    to->low.values = (float *)next, next += ALIGNED(adapted * output * 4);
    const int64_t numbers = input * (model->is_bf16 ? 2 : 1);
    const int64_t wide_bytes = WIDENS && model->is_bf16 ? numbers * 4 : ROUNDED_BYTES(numbers);
    to->room = next, next += ALIGNED(tokens * wide_bytes);
    to->tiles = next, next += threads * place_tile(model, next, &tile);
    return next - memory;
}

/* One row of the embedding. A tied model stores it once, packed for the product. */
INLINE void embed(const int is_bf16, const Model *model, int64_t token_id, float *to) {
    if (model->embedding) {
        for (int64_t i = 0; i < model->hidden_size; i += VL)
            v_store(to + i, v_read(is_bf16, model->embedding, token_id * model->hidden_size + i));
        return;
    }
    const Linear *table = &model->table;
    const int64_t steps = table->steps;
    if (table->strips) {
        const Strip *strip = table->strips + token_id / VL;
        strip_weights((int)strip->form, (const uint8_t *)table->weight + strip->offset,
                      model->hidden_size / GROUP, token_id % VL, to);
        return;
    }
    const char *from = (const char *)table->weight +
                       (token_id / PANEL * steps * PANEL + token_id % PANEL) * 4;
    for (int64_t s = 0; s < steps; s++) {
        uint32_t word, low;
        memcpy(&word, from + s * PANEL * 4, 4);
        if (!is_bf16) {
            memcpy(to + s, &word, 4);
            continue;
        }
        low = word << 16;
        word &= 0xffff0000u;
        memcpy(to + 2 * s, &low, 4);
        memcpy(to + 2 * s + 1, &word, 4);
    }
}

/* The factor of a root-mean-square norm. */
INLINE float inverse_rms(const float *from, int64_t size, double eps) {
    vf squares[PARTS];
    for (int part = 0; part < PARTS; part++) squares[part] = v_set(0.0f);
    for (int64_t i = 0; i < size; i += SUM_LANES)
        for (int part = 0; part < PARTS; part++) {
            const vf x = v_load(from + i + part * VL);
            squares[part] = v_fma(x, x, squares[part]);
        }
    return 1.0f / sqrtf(v_total(squares) / (float)size + (float)eps);
}

/* Norm rows, for a layer's input. */
INLINE void norm_rows(const int is_bf16, const Model *model, const float *weight,
                      const Linear *layer, int64_t rows, const Buffers *at) {
    const int to_bf16 = takes_bf16(is_bf16, layer);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = at->hidden + row * at->hidden_stride;
        const vf factor = v_set(inverse_rms(from, model->hidden_size, model->eps));
        for (int64_t i = 0; i < model->hidden_size; i += VL)
            v_write(to_bf16, at->normed, row * model->hidden_size + i,
                    v_mul(v_mul(v_load(from + i), factor), v_load(weight + i)));
    }
}

/* Rotate a head by its position's angles. Its halves are the two coordinates, as in Hugging Face's
 * weights. `norm` is [head_dim] or NULL. */
INLINE void rotate_head(const Model *model, const float *norm, int64_t position, float scale,
                        const float *from, float *to) {
    const int64_t half = model->head_dim / 2;
    const float *cosines = model->cosines + position * half;
    const float *sines = model->sines + position * half;
    float normed[MAX_HEAD_DIM];
    if (norm) {
        const float factor = inverse_rms(from, model->head_dim, model->eps);
        for (int64_t i = 0; i < model->head_dim; i++) normed[i] = from[i] * factor * norm[i];
        from = normed;
    }
    for (int64_t i = 0; i < half; i++) {
        to[i] = (from[i] * cosines[i] - from[half + i] * sines[i]) * scale;
        to[half + i] = (from[half + i] * cosines[i] + from[i] * sines[i]) * scale;
    }
}

/* Rotate queries into their buffer and keys into the pool, and copy values into the pool. */
INLINE void rotate_and_store(const int is_bf16, const Model *model, int64_t layer, const Step *step,
                             const Buffers *at) {
    const int64_t size = is_bf16 ? 2 : 4, dim = model->head_dim, heads = model->num_heads;
    const int64_t kv_numbers = model->block_size * model->num_kv_heads * dim;
#pragma omp for schedule(static)
    for (int64_t token = 0; token < step->num_tokens; token++) {
        const Layer *weights = &model->layers[layer];
        const float *from = at->heads + token * at->heads_stride;
        const int64_t position = step->positions[token];
        const int64_t block = step->slots[token] / model->block_size;
        const int64_t offset = step->slots[token] % model->block_size;
        char *keys = (char *)model->pool + ((block * model->num_layers + layer) * 2 * kv_numbers +
                                            offset * model->num_kv_heads * dim) * size;
        float rotated[MAX_HEAD_DIM];
        for (int64_t head = 0; head < heads; head++) {
            rotate_head(model, weights->query_norm, position, (float)model->scale,
                        from + head * dim, rotated);
            for (int64_t i = 0; i < dim; i += VL)
                v_write(is_bf16, at->queries, (token * heads + head) * dim + i,
                        v_load(rotated + i));
        }
        for (int64_t head = 0; head < model->num_kv_heads; head++) {
            rotate_head(model, weights->key_norm, position, 1.0f, from + (heads + head) * dim,
                        rotated);
            const float *value = from + (heads + model->num_kv_heads + head) * dim;
            for (int64_t i = 0; i < dim; i += VL) {
                v_write(is_bf16, keys, head * dim + i, v_load(rotated + i));
                v_write(is_bf16, keys, kv_numbers + head * dim + i, v_load(value + i));
            }
        }
    }
}

/* Move the sampled tokens' rows to the front: the last layer computes only these. */
static void keep_sampled(const Model *model, const Step *step, const Buffers *at) {
    const int64_t bytes = model->num_heads * model->head_dim * (model->is_bf16 ? 2 : 4);
    for (int64_t i = 0; i < step->num_sampled; i++) {
        const int64_t from = step->sampled[i];
        memmove(at->hidden + i * at->hidden_stride, at->hidden + from * at->hidden_stride,
                at->hidden_stride * 4);
        memmove(at->queries + i * bytes, at->queries + from * bytes, bytes);
    }
}

/* Output the hidden states of the kept tokens, then move those that need logits to the front. */
static void keep_chosen(const int is_bf16, const Model *model, const Step *step,
                        const Buffers *at) {
    const int from_bf16 = takes_bf16(is_bf16, &model->lm_head);
    const int64_t size = model->hidden_size, bytes = size * (from_bf16 ? 2 : 4);
    if (step->states)
        for (int64_t i = 0; i < step->num_sampled * size; i += VL)
            v_store(step->states + i, v_read(from_bf16, at->normed, i));
    for (int64_t i = 0; i < step->num_chosen; i++)
        memmove(at->normed + i * bytes, at->normed + step->chosen[i] * bytes, bytes);
}

/* Add the time since `since` to one part, if timing is on. Between two barriers the first thread's
 * time counts for all. */
static void mark(const Step *step, int part, double *since) {
    if (!step->part_s || omp_get_thread_num()) return;
    const double now = omp_get_wtime();
    step->part_s[part] += now - *since;
    *since = now;
}

/* Add the adapters' share to one linear layer. */
#define ADAPT(name, rows, input)                                                                  \
    adapt(is_bf16, model, rows, index, offsetof(LayerAdapter, name), &layer->name, input, &at->low)

/* One layer, by all threads of the enclosing region. */
INLINE void compute_layer(const int is_bf16, const Model *model, int64_t index, const Step *step,
                          const Buffers *at, int64_t threads, Tile *tile, double *since) {
    const Layer *layer = &model->layers[index];
    const int is_last = index + 1 == model->num_layers;
    const int64_t rows = is_last ? step->num_sampled : step->num_tokens;
    const Adapted *adapted = is_last ? &step->last_adapted : &step->adapted;
    Added added;
    norm_rows(is_bf16, model, layer->attention_norm, &layer->qkv, step->num_tokens, at);
    mark(step, PART_REST, since);
    added = ADAPT(qkv, &step->adapted, at->normed);
    linear(is_bf16, STORE, &layer->qkv, &added, at->normed, step->num_tokens, at->room,
           at->heads, at->heads_stride);
    mark(step, PART_PRODUCTS, since);
    rotate_and_store(is_bf16, model, index, step, at);
    if (is_last) {
#pragma omp single
        keep_sampled(model, step, at);
    }
    mark(step, PART_REST, since);
    attend(is_bf16, takes_bf16(is_bf16, &layer->output), model, index, step,
           is_last ? step->last_tasks : step->tasks,
           is_last ? step->num_sampled : step->num_tasks, is_last ? 1 : step->task_tokens, threads,
           at->queries, at->attended, tile);
    mark(step, PART_ATTENTION, since);
    added = ADAPT(output, adapted, at->attended);
    linear(is_bf16, ADD, &layer->output, &added, at->attended, rows, at->room,
           at->hidden, at->hidden_stride);
    mark(step, PART_PRODUCTS, since);
    norm_rows(is_bf16, model, layer->mlp_norm, &layer->gate_up, rows, at);
    mark(step, PART_REST, since);
    added = ADAPT(gate_up, adapted, at->normed);
    linear(is_bf16, layer->down.strips ? GATE_FLOATS : GATE, &layer->gate_up, &added, at->normed,
           rows, at->room, at->joined, at->joined_stride);
    added = ADAPT(down, adapted, at->joined);
    linear(is_bf16, ADD, &layer->down, &added, at->joined, rows, at->room, at->hidden,
           at->hidden_stride);
    mark(step, PART_PRODUCTS, since);
}

INLINE void compute(const int is_bf16, const Model *model, const Step *step, int64_t threads) {
    Buffers at;
    place_buffers(model, step->num_tokens, step->adapted.num_rows, threads, step->workspace, &at);
#pragma omp parallel num_threads(threads)
    {
        const unsigned before = flush_subnormals();
        double since = step->part_s ? omp_get_wtime() : 0.0;
        Tile tile;
        const int64_t tile_bytes = place_tile(model, at.tiles, &tile);
        place_tile(model, at.tiles + omp_get_thread_num() * tile_bytes, &tile);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < step->num_tokens; token++)
            embed(is_bf16, model, step->token_ids[token], at.hidden + token * at.hidden_stride);
        for (int64_t layer = 0; layer < model->num_layers; layer++)
            compute_layer(is_bf16, model, layer, step, &at, threads, &tile, &since);
        norm_rows(is_bf16, model, model->norm, &model->lm_head, step->num_sampled, &at);
        if (step->num_chosen < step->num_sampled) {
#pragma omp single
            keep_chosen(is_bf16, model, step, &at);
        }
        mark(step, PART_REST, &since);
        linear(is_bf16, STORE, &model->lm_head, &NOTHING_ADDED, at.normed, step->num_chosen,
               at.room, step->logits, model->lm_head.panels * PANEL);
        mark(step, PART_HEAD, &since);
        restore_subnormals(before);
    }
}

static void compute_bf16(const Model *model, const Step *step, int64_t threads) {
    compute(1, model, step, threads);
}

static void compute_f32(const Model *model, const Step *step, int64_t threads) {
    compute(0, model, step, threads);
}

#define EXPORT __attribute__((visibility("default")))

/* Outputs per panel of packed weights. */
EXPORT int64_t triolet_panel(void) { return PANEL; }

/* Builds with equal numbers compute the same bits. */
EXPORT int64_t triolet_arithmetic(void) { return ARITHMETIC; }

/* Rows of a task: its positions times the query heads that share a key head. */
EXPORT int64_t triolet_rows_per_task(void) { return TILE_ROWS; }

#define HAS(name) __builtin_cpu_supports(name)

/* Whether this machine supports the instructions of this build. Every CPU with AVX2 has F16C. */
EXPORT int64_t triolet_runs_here(void) {
    __builtin_cpu_init();
#if defined(__AVX512F__)
    int runs = HAS("avx512f") && HAS("avx512bw") && HAS("avx512vl");
#else
    int runs = HAS("avx2") && HAS("fma");
#endif
#if defined(__AVX512BF16__)
    runs = runs && HAS("avx512bf16");
#endif
#if defined(__AVX512VNNI__)
    runs = runs && HAS("avx512vnni");
#endif
#if defined(__AVXVNNI__)
    runs = runs && HAS("avxvnni");
#endif
    return runs;
}

EXPORT int64_t triolet_workspace_bytes(const Model *model, int64_t tokens, int64_t adapted,
                                       int64_t threads) {
    Buffers at;
    return place_buffers(model, tokens, adapted, threads, NULL, &at);
}

EXPORT void triolet_compute(const Model *model, const Step *step, int64_t threads) {
    (model->is_bf16 ? compute_bf16 : compute_f32)(model, step, threads);
}

/* Attention alone, for tests. KV is already in the pool, and queries are scaled. */
EXPORT void triolet_attend(const Model *model, const Step *step, int64_t layer, const char *queries,
                           char *output) {
    Tile tile;
    const unsigned before = flush_subnormals();
    place_tile(model, step->workspace, &tile);
    if (model->is_bf16)
        attend(1, 1, model, layer, step, step->tasks, step->num_tasks, step->task_tokens, 1,
               queries, output, &tile);
    else
        attend(0, 0, model, layer, step, step->tasks, step->num_tasks, step->task_tokens, 1,
               queries, output, &tile);
    restore_subnormals(before);
}

/* The machine's limits in seconds; see limits.h. */
EXPORT double triolet_time_reading(const char *memory, int64_t bytes, int64_t threads) {
    return time_reading(memory, bytes, threads);
}

EXPORT double triolet_time_products(int64_t is_bf16, int64_t rounds, int64_t threads) {
    return time_products(is_bf16, rounds, threads);
}

EXPORT int64_t triolet_product_operations(int64_t is_bf16) { return product_operations(is_bf16); }

/* Pack a weight into panels. */
EXPORT void triolet_pack(const Packing *packing, int64_t threads) { pack(packing, threads); }

EXPORT int64_t triolet_strip_bytes(int64_t form, int64_t inputs) {
    return strip_bytes((int)form, inputs / GROUP);
}

/* Pack blocks into strips; returns how many scales are not finite. */
EXPORT int64_t triolet_pack_groups(const GroupPacking *packing, int64_t threads) {
    return pack_strips(packing, threads);
}

/* The weights of a quantised layer's output, for tests. */
EXPORT void triolet_weights(const Linear *layer, int64_t inputs, int64_t output, float *to) {
    const Strip *strip = layer->strips + output / VL;
    strip_weights((int)strip->form, (const uint8_t *)layer->weight + strip->offset,
                  inputs / GROUP, output % VL, to);
}

/* Compute a single product, for tests and benchmarks. input: numbers, but floats for a quantised
 * layer; output: floats [rows][panels * PANEL]; room: triolet_product_bytes. */
EXPORT int64_t triolet_product_bytes(const Linear *layer, int64_t rows) {
    return rows * layer->steps * 8;
}
EXPORT void triolet_product(int64_t is_bf16, const Linear *layer, const char *input, int64_t rows,
                            char *room, float *output, int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        const unsigned before = flush_subnormals();
        if (is_bf16)
            linear(1, STORE, layer, &NOTHING_ADDED, input, rows, room, output,
                   layer->panels * PANEL);
        else
            linear(0, STORE, layer, &NOTHING_ADDED, input, rows, room, output,
                   layer->panels * PANEL);
        restore_subnormals(before);
    }
}
