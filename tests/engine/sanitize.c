/* A driver for the kernels under AddressSanitizer and UndefinedBehaviorSanitizer.
 *
 * Every array is a piece of memory of exactly the size that model.h states, so that a read or write
 * one element beyond is found. It computes prompts in chunks and decodes several sequences, in both
 * dtypes, in all forms of quantised weights, tied and untied, with odd sizes; what comes out must be
 * numbers.
 * What the numbers are is the business of the Python tests.
 */
#include "../../engine/native/source/forward.c"

#include <stdio.h>
#include <stdlib.h>

#ifndef DIM
#define DIM 16
#endif
enum { LAYERS = 2, HEADS = 6, KV_HEADS = 2, VOCABULARY = 77, RANK = 6 };
static int64_t HIDDEN = 80, WIDE = 70; /* 256, whole blocks, where weights are quantised */
enum { BLOCK = 5, BLOCKS = 64, MOST = 128, THREADS = 2 };

static uint32_t state = 7;
static int64_t missing_bytes = 0; /* of the logits: to see that somebody looks */

static float random_number(void) {
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (1 << 24) - 0.5f;
}

static void *room(int64_t bytes) {
    void *memory = malloc((size_t)bytes);
    if (!memory) abort();
    return memory;
}

/* numbers of the model's dtype */
static char *numbers(int is_bf16, int64_t count) {
    char *to = room(count * (is_bf16 ? 2 : 4));
    for (int64_t i = 0; i < count; i++) {
        const float x = random_number() * 0.4f;
        if (is_bf16)
            memcpy(to + 2 * i, (const char *)&x + 2, 2);
        else
            memcpy(to + 4 * i, &x, 4);
    }
    return to;
}

static float *floats(int64_t count, float first) {
    float *to = room(count * 4);
    for (int64_t i = 0; i < count; i++) to[i] = first + random_number();
    return to;
}

/* Random blocks, half the strips of one form and half of another where they are gates and ups. */
static Linear quantised_of(int is_bf16, int form, int64_t outputs, int64_t inputs, int is_gate_up,
                           int has_bias) {
    const int64_t half = is_gate_up ? 2 : 1, row_bytes = inputs / 32 * 36; /* at least */
    Linear to = {0};
    to.panels = (outputs / half + PANEL / half - 1) / (PANEL / half);
    to.steps = inputs * (is_bf16 ? 2 : 4) / 4;
    Strip *strips = room(to.panels * NV * (int64_t)sizeof(Strip));
    int64_t bytes = 0;
    for (int64_t i = 0; i < to.panels * NV; i++) {
        strips[i] = (Strip){is_gate_up && i % 2 ? Q4_1 : form, bytes};
        bytes += triolet_strip_bytes(strips[i].form, inputs);
    }
    char *packed = room(bytes);
    for (int64_t part = 0; part < half; part++) {
        uint8_t *blocks = room(outputs / half * row_bytes);
        for (int64_t i = 0; i < outputs / half * row_bytes; i++)
            blocks[i] = (uint8_t)(random_number() * 256.0f) & 0x1b;
        const int64_t count = is_gate_up ? to.panels : to.panels * NV;
        const GroupPacking packing = {outputs / half, inputs, blocks, row_bytes, count,
                                      is_gate_up ? 2 : 1, strips + part, packed};
        if (triolet_pack_groups(&packing, THREADS)) abort();
        free(blocks);
    }
    to.weight = packed;
    to.strips = strips;
    to.bias = has_bias ? floats(to.panels * PANEL, 0.0f) : NULL;
    return to;
}

static Linear linear_of(int is_bf16, int form, int64_t outputs, int64_t inputs, int is_gate_up,
                        int64_t least_inputs, int has_bias) {
    if (form && inputs % (form < Q4_K ? 32 : 256) == 0)
        return quantised_of(is_bf16, form, outputs, inputs, is_gate_up, has_bias);
    const int64_t per_word = is_bf16 ? 2 : 1, half = is_gate_up ? 2 : 1;
    char *weight = numbers(is_bf16, outputs * inputs), *nothing = numbers(is_bf16, inputs);
    memset(nothing, 0, (size_t)(inputs * 4 / per_word));
    Linear to = {0};
    to.panels = (outputs / half + PANEL / half - 1) / (PANEL / half);
    to.steps = ((inputs > least_inputs ? inputs : least_inputs) + per_word - 1) / per_word;
    void *packed = room(to.panels * to.steps * PANEL * 4);
    const Packing packing = {is_bf16, outputs,   inputs,   is_gate_up, weight,
                             nothing, to.panels, to.steps, packed};
    triolet_pack(&packing, THREADS);
    free(weight);
    free(nothing);
    to.weight = packed;
    to.bias = has_bias ? floats(to.panels * PANEL, 0.0f) : NULL;
    return to;
}

static void free_linear(const Linear *of) {
    free((void *)of->weight);
    free((void *)of->strips);
    free((void *)of->bias);
}

static Layer layer_of(int is_bf16, int form, int has_extras) {
    Layer to = {0};
    to.qkv = linear_of(is_bf16, form, (HEADS + 2 * KV_HEADS) * DIM, HIDDEN, 0, 0, has_extras);
    to.output = linear_of(is_bf16, form, HIDDEN, HEADS * DIM, 0, 0, has_extras);
    to.gate_up = linear_of(is_bf16, form, 2 * WIDE, HIDDEN, 1, 0, has_extras);
    to.down = linear_of(is_bf16, form, HIDDEN, WIDE, 0, to.gate_up.panels * PANEL / 2,
                        has_extras);
    to.attention_norm = floats(HIDDEN, 1.0f);
    to.mlp_norm = floats(HIDDEN, 1.0f);
    to.query_norm = has_extras ? floats(DIM, 1.0f) : NULL;
    to.key_norm = has_extras ? floats(DIM, 1.0f) : NULL;
    return to;
}

/* What one adapter adds to a linear layer, of rank 6. */
static LowRank low_of(int is_bf16, const Linear *base, int64_t inputs, int64_t outputs,
                      int is_gate_up, int64_t *low_stride) {
    LowRank to;
    to.down = linear_of(is_bf16, 0, RANK, inputs, 0, base->steps * (is_bf16 ? 2 : 1), 0);
    *low_stride = to.down.panels * PANEL;
    to.up = linear_of(is_bf16, 0, outputs, RANK, is_gate_up, 0, 0);
    return to;
}

static LayerAdapter adapter_of(int is_bf16, const Layer *layer, int64_t *low_stride) {
    LayerAdapter to = {0};
    to.qkv = low_of(is_bf16, &layer->qkv, HIDDEN, (HEADS + 2 * KV_HEADS) * DIM, 0, low_stride);
    to.gate_up = low_of(is_bf16, &layer->gate_up, HIDDEN, 2 * WIDE, 1, low_stride);
    to.down = low_of(is_bf16, &layer->down, WIDE, HIDDEN, 0, low_stride);
    return to; /* the output layer is left as it is */
}

static void free_adapter(const LayerAdapter *of) {
    free_linear(&of->qkv.down), free_linear(&of->qkv.up);
    free_linear(&of->gate_up.down), free_linear(&of->gate_up.up);
    free_linear(&of->down.down), free_linear(&of->down.up);
}

/* All rows but the first have the adapter, in groups of two sizes. */
static Adapted rows_of(const LayerAdapter *adapter, int64_t rows, int64_t *memory, Group *groups) {
    int64_t *places = memory, *with = memory + rows, count = rows - 1;
    places[0] = -1;
    for (int64_t i = 0; i < count; i++) places[1 + i] = i, with[i] = 1 + i;
    groups[0] = (Group){adapter, 0, count / 3};
    groups[1] = (Group){adapter, count / 3, count};
    return (Adapted){count, 2, with, places, groups};
}

/* One step: `counts[i]` tokens of sequence i from position `starts[i]` on; each samples. */
static void step_of(const Model *model, const LayerAdapter *adapted, int64_t sequences,
                    const int64_t *starts, const int64_t *counts) {
    const int64_t group = HEADS / KV_HEADS, most = TILE_ROWS / group;
    int64_t tokens = 0, tasks = 0, task_tokens = 0, table = 0;
    for (int64_t i = 0; i < sequences; i++) {
        tokens += counts[i];
        tasks += (counts[i] + most - 1) / most;
    }
    int64_t *ids = room(tokens * 8), *positions = room(tokens * 8), *slots = room(tokens * 8);
    int64_t *tables = room(BLOCKS * 8), *sampled = room(sequences * 8);
    Task *all = room(tasks * (int64_t)sizeof(Task));
    Task *last = room(sequences * (int64_t)sizeof(Task));
    int64_t token = 0, task = 0;
    for (int64_t i = 0; i < sequences; i++) {
        const int64_t end = starts[i] + counts[i], blocks = (end + BLOCK - 1) / BLOCK;
        for (int64_t b = 0; b < blocks; b++) tables[table + b] = BLOCKS - 1 - (i * 12 + b);
        for (int64_t first = 0; first < counts[i]; first += most) {
            const int64_t count = counts[i] - first < most ? counts[i] - first : most;
            all[task++] = (Task){table, starts[i] + first, count, token + first};
            if (count > task_tokens) task_tokens = count;
        }
        for (int64_t t = 0; t < counts[i]; t++, token++) {
            const int64_t position = starts[i] + t;
            ids[token] = (position * 31 + i) % VOCABULARY;
            positions[token] = position;
            slots[token] = tables[table + position / BLOCK] * BLOCK + position % BLOCK;
        }
        sampled[i] = token - 1;
        last[i] = (Task){table, end - 1, 1, i};
        table += blocks;
    }
    const int64_t width = model->lm_head.panels * PANEL;
    double part_s[NUM_PARTS] = {0};
    Step step = {.num_tokens = tokens,
                 .num_tasks = tasks,
                 .task_tokens = task_tokens,
                 .num_sampled = sequences,
                 .num_chosen = sequences,
                 .token_ids = ids,
                 .positions = positions,
                 .slots = slots,
                 .tables = tables,
                 .tasks = all,
                 .last_tasks = last,
                 .sampled = sampled,
                 .logits = room(sequences * width * 4 - missing_bytes),
                 .workspace = room(triolet_workspace_bytes(model, tokens, adapted ? tokens - 1 : 0,
                                                             THREADS)),
                 .part_s = part_s};
    Group groups[4];
    int64_t *rows = room(2 * (tokens + sequences) * 8);
    if (adapted) {
        step.adapted = rows_of(adapted, tokens, rows, groups);
        step.last_adapted = rows_of(adapted, sequences, rows + 2 * tokens, groups + 2);
    }
    triolet_compute(model, &step, THREADS);
    free(rows);
    for (int64_t i = 0; i < sequences; i++)
        for (int64_t id = 0; id < VOCABULARY; id++)
            if (!isfinite(step.logits[i * width + id])) {
                printf("logit %lld of sequence %lld is no number\n", (long long)id, (long long)i);
                exit(1);
            }
    free(ids), free(positions), free(slots), free(tables), free(sampled), free(all), free(last);
    free(step.logits), free(step.workspace);
}

static void run_model(int is_bf16, int form, int is_tied) {
    HIDDEN = form ? 256 : 80, WIDE = form ? 256 : 70;
    Layer *layers = room(LAYERS * (int64_t)sizeof(Layer));
    for (int i = 0; i < LAYERS; i++) layers[i] = layer_of(is_bf16, form, is_tied);
    char *embedding = is_tied || form ? NULL : numbers(is_bf16, (int64_t)VOCABULARY * HIDDEN);
    const Linear table = linear_of(is_bf16, form, VOCABULARY, HIDDEN, 0, 0, 0);
    const Linear head = linear_of(is_bf16, form, VOCABULARY, HIDDEN, 0, 0, 0);
    float *norm = floats(HIDDEN, 1.0f), *cosines = floats(MOST * DIM / 2, 0.0f);
    float *sines = floats(MOST * DIM / 2, 0.0f);
    const int64_t pool_numbers = (int64_t)BLOCKS * LAYERS * 2 * BLOCK * KV_HEADS * DIM;
    char *pool = room(pool_numbers * (is_bf16 ? 2 : 4));
    memset(pool, 0xff, (size_t)(pool_numbers * (is_bf16 ? 2 : 4))); /* all NaN */
    LayerAdapter *adapter = room(LAYERS * (int64_t)sizeof(LayerAdapter));
    int64_t low_stride = 0;
    for (int i = 0; i < LAYERS; i++) adapter[i] = adapter_of(is_bf16, &layers[i], &low_stride);
    const Model model = {is_bf16, LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, BLOCK, 1e-5, 0.25,
                         embedding, layers, norm, head, is_tied ? head : table, cosines, sines,
                         pool, low_stride};
    step_of(&model, NULL, 1, (int64_t[]){0}, (int64_t[]){1});
    step_of(&model, adapter, 3, (int64_t[]){0, 0, 0}, (int64_t[]){37, 5, 58});
    step_of(&model, NULL, 2, (int64_t[]){37, 5}, (int64_t[]){22, 50});
    for (int64_t i = 0; i < 4; i++)
        step_of(&model, i % 2 ? adapter : NULL, 3, (int64_t[]){59 + i, 55 + i, 58 + i},
                (int64_t[]){1, 1, 1});
    for (int i = 0; i < LAYERS; i++) free_adapter(&adapter[i]);
    free(adapter);
    for (int i = 0; i < LAYERS; i++) {
        free_linear(&layers[i].qkv), free_linear(&layers[i].output);
        free_linear(&layers[i].gate_up), free_linear(&layers[i].down);
        free((void *)layers[i].attention_norm), free((void *)layers[i].mlp_norm);
        free((void *)layers[i].query_norm), free((void *)layers[i].key_norm);
    }
    free_linear(&head), free_linear(&table);
    free(layers), free(embedding), free(norm), free(cosines), free(sines), free(pool);
}

int main(int count, char **arguments) {
    if (!triolet_runs_here()) {
        puts("not for this machine");
        return 0;
    }
    if (count > 1 && !strcmp(arguments[1], "spoil")) missing_bytes = 4;
    const int forms[] = {0, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K};
    for (int kind = 0; kind < 36; kind++) run_model(kind & 1, forms[kind / 4], kind >> 1 & 1);
    puts("clean");
    return 0;
}
