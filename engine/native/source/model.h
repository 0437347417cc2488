/* The structures that Python passes: a model once, and a step for each call. Mirrored field by
 * field in engine/native/structs.py. All counts are int64 and all tensors plain pointers, so
 * torch's headers are not needed. "Number" means float or bf16, depending on `is_bf16`.
 */
#ifndef TRIOLET_MODEL_H
#define TRIOLET_MODEL_H

#include <stdint.h>

/* Raise this with every change that may change a bit of a result: workers with different numbers do
 * not exchange KV or continue each other's sequences. */
#define ARITHMETIC 3

/* Quantised weights of VL outputs: half a panel. See groups.h. */
typedef struct {
    int64_t form;   /* as ggml numbers it */
    int64_t offset; /* bytes from the layer's weight */
} Strip;

/* A linear layer, its weight packed into panels of PANEL outputs: [panels][steps][PANEL] words of
 * four bytes. A word is one float, or two bf16 of neighbouring inputs. A quantised weight has
 * strips instead, whose forms may differ within a layer; its input is floats, because rounding to
 * bf16 and then to int8 would lose more. */
typedef struct {
    const void *weight;
    const Strip *strips; /* [panels * 2], or NULL */
    const float *bias;   /* [panels * PANEL], or NULL */
    int64_t panels;
    int64_t steps; /* words of four bytes in a row of input */
} Linear;

typedef struct {
    Linear qkv;     /* query heads, key heads, value heads */
    Linear output;
    Linear gate_up; /* each panel: half of it gates, then the ups that belong to them */
    Linear down;
    const float *attention_norm;
    const float *query_norm; /* [head_dim] or NULL */
    const float *key_norm;
    const float *mlp_norm;
} Layer;

/* A low-rank product that an adapter adds to a linear layer: up(down(input)), with the scale
 * multiplied into `up`. The ranks of layers that share their input are concatenated. */
typedef struct {
    Linear down; /* weight NULL: the adapter leaves this layer as it is */
    Linear up;   /* its panels are those of the linear layer */
} LowRank;

typedef struct {
    LowRank qkv;
    LowRank output;
    LowRank gate_up;
    LowRank down;
} LayerAdapter;

typedef struct {
    int64_t is_bf16;
    int64_t num_layers;
    int64_t hidden_size; /* a multiple of 16, as head_dim is */
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;
    double eps;
    double scale;          /* of scores */
    const void *embedding; /* numbers [vocab_size][hidden_size]; NULL: rows of `table` */
    const Layer *layers;
    const float *norm;
    Linear lm_head;
    Linear table; /* lm_head of a tied model, or an embedding that is quantised */
    const float *cosines; /* [max_model_len][head_dim / 2] */
    const float *sines;
    void *pool; /* numbers [blocks][num_layers][2][block_size][num_kv_heads][head_dim] */
    int64_t low_stride; /* numbers of the widest `down` of any adapter; 0 without adapters */
} Model;

/* Rows of one adapter. */
typedef struct {
    const LayerAdapter *layers; /* [num_layers] */
    int64_t first;              /* index into `rows` */
    int64_t end;
} Group;

/* The rows of a step, or of its last layer, that use an adapter. */
typedef struct {
    int64_t num_rows;
    int64_t num_groups;
    const int64_t *rows;   /* [num_rows], those of a group next to one another */
    const int64_t *places; /* of each row of the step its index into `rows`, or -1 */
    const Group *groups;
} Adapted;

/* A range of positions of one sequence that are attended together. */
typedef struct {
    int64_t table;    /* where the sequence's blocks begin in `tables` */
    int64_t position; /* of the first */
    int64_t count;
    int64_t token;    /* index of the first among the step's tokens */
} Task;

typedef struct {
    int64_t num_tokens;
    int64_t num_tasks;
    int64_t task_tokens; /* of the longest task */
    int64_t num_sampled;
    const int64_t *token_ids;
    const int64_t *positions;
    const int64_t *slots;   /* block * block_size + offset */
    const int64_t *tables;  /* all sequences' blocks, end to end */
    const Task *tasks;      /* of all tokens */
    const Task *last_tasks; /* one per sampled token: all that the last layer computes */
    const int64_t *sampled; /* ascending indices of tokens: those that leave more than their KV */
    float *logits;          /* [num_chosen][lm_head.panels * PANEL] */
    char *workspace;        /* triolet_workspace_bytes */
    double *part_s;         /* [NUM_PARTS], to be added to; or NULL */
    int64_t num_chosen;     /* of the sampled tokens, those that want logits */
    const int64_t *chosen;  /* ascending, indices into `sampled` */
    float *states;          /* [num_sampled][hidden_size] after the last norm; or NULL */
    Adapted adapted;        /* of all tokens */
    Adapted last_adapted;   /* of the sampled ones */
} Step;

/* The parts of a step in `part_s`. */
enum { PART_PRODUCTS, PART_ATTENTION, PART_HEAD, PART_REST, NUM_PARTS };

/* A weight of a checkpoint, and the target of its packed form. */
typedef struct {
    int64_t is_bf16;
    int64_t outputs;
    int64_t inputs;      /* even in bf16 */
    int64_t is_gate_up;  /* gates and ups share panels */
    const char *weight;  /* numbers [outputs][inputs] */
    const char *nothing; /* [inputs] zeros */
    int64_t panels;
    int64_t steps;       /* at least the words of a row; what is beyond becomes zero */
    void *packed;
} Packing;

/* Quantised outputs of a GGUF file, and the target of their packed form. */
typedef struct {
    int64_t outputs;
    int64_t inputs; /* whole blocks */
    const uint8_t *blocks;
    int64_t row_bytes;   /* of an output's blocks */
    int64_t num_strips;
    int64_t every;       /* 2: gates or ups, whose strips take turns; else 1 */
    const Strip *strips; /* the first of them */
    void *packed;
} GroupPacking;

#endif
