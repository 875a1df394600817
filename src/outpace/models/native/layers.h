/* What a run of decoder layers is made of. The Python side (layers.py) fills these structures; keep both alike. */
#ifndef OUTPACE_LAYERS_H
#define OUTPACE_LAYERS_H

#include "outpace.h"

typedef struct {
    int32_t hidden, heads, kv_heads, head_dim, wide; /* wide: width of the MLP */
    float epsilon;                                   /* of the RMS norms */
    float query_scale;
} Shape;

typedef struct {
    const float *input_norm, *mlp_norm;   /* [hidden] */
    const float *query_norm, *key_norm;   /* [head_dim], or NULL */
    const float *stream_norm;             /* [hidden], of a layer that reads pairs (below), or NULL */
    Matrix query, key, value, out, gate, up, down;
    int32_t window; /* slots a row sees at most, itself included; 0 for all */
    int32_t adds_to_normed; /* a layer that reads pairs adds to the stream behind its norm, not to the stream itself */
} Layer;

/* Rows [begin, end) of the pack belong to one request, in slots from first_slot on of its lane.
 *
 * Rows from `straight` on are nodes of a tree. Each sees slots [0, fork) and then the slots of its path, its own last.
 * `paths` has a line of `stride` numbers for each: how many slots, then these in order. */
typedef struct {
    int32_t lane, begin, end, first_slot;
    int32_t straight, fork, stride;
    const int32_t *paths;
} Segment;

typedef struct {
    const Shape *shape;
    const Layer *layers;
    int32_t begin, end;         /* layers to run */
    int32_t rows, segments, capacity, threads;
    float *hidden;              /* [rows, hidden]: entering `begin`; becomes what enters `end` */
    const float *turns;         /* [rows, head_dim / 2, 2]: cosine and sine of each position's rotations */
    const Segment *segment;
    float *const *keys, *const *values; /* a layer's cache each: [lanes * kv_heads, capacity, head_dim] */
    const float *beside;        /* [rows, hidden]: layers that read pairs get norms of these and of the stream, side by
                                   side; their query, key and value have twice the inputs. NULL for others */
    float *const *entering;     /* [layers + 1]: where to copy the states entering a layer, or NULL; NULL for none */
    const int64_t *keep;        /* rows of which the last layer's result is wanted, or NULL for all */
    int32_t kept;               /* how many; their states are then hidden [0, kept) */

    /* Scratch, set up by run_layers. */
    Inputs joined, normed, mixed, gated;
    float *query, *key, *value, *up;
} Run;

int attention_rows(const Run *run);
void attend(const Run *run, int layer, const Segment *segment, int kv_head, int from, int to);

int run_layers(Run *run);
int run_head(const float *norm, float epsilon, const Matrix *head, const float *hidden, int rows, float *logits, int threads);

#endif
