/* Causal attention of one request's rows over its cache, in float32.
 *
 * Keys and values of a head lie slot by slot. A query passes over its slots in order, in spans at absolute multiples of
 * SPAN, with a running maximum (arXiv 2205.14135): scores of eight slots at a time, weights, then the values slot by
 * slot. All queries of a task visit a span while it is in the first-level cache. What a query computes does not
 * depend on who else is computed, and slots it must not see never enter a sum: what a rejected draft left behind cannot
 * reach it.
 *
 * A node of a tree sees its own path where a chain would see its last slots. Spans and groups of eight are those of
 * positions along the path, so the sums are those of the chain, number by number; only where a row is read from differs.
 */
#include <math.h>

#include "layers.h"

enum {
    SPAN = 32,         /* slots whose keys and values are used by all queries of a task before the next */
    MOST_QUERIES = 64, /* of a task, unless a group of heads is larger */
};

typedef struct {
    const float *query; /* [dim] */
    float *out;         /* [dim]: weighted values so far */
    int begin, end;     /* positions it sees; position i is slot i, */
    int fork;           /* but from here on (end, if there is no such) */
    const int32_t *path; /* slot path[i - fork] */
    float top;          /* largest score so far */
    __m256 total;       /* weights so far, slot i in lane i % 8 */
} Query;

/* Scores of eight slots: query [dim] times keys [8][dim]. */
INLINE __m256 eight_scores(const float *query, const float *const keys[8], int dim) {
    __m256 s[8];
    EACH(i, 8) s[i] = _mm256_setzero_ps();
    int whole = dim & ~7;
    for (int d = 0; d < whole; d += 8) {
        __m256 part = _mm256_loadu_ps(query + d);
        EACH(i, 8) s[i] = _mm256_fmadd_ps(part, _mm256_loadu_ps(keys[i] + d), s[i]);
    }
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(s[0], s[1]), _mm256_hadd_ps(s[2], s[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(s[4], s[5]), _mm256_hadd_ps(s[6], s[7]));
    __m256 sums = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    for (int d = whole; d < dim; d++) {
        __m256 column = _mm256_setr_ps(keys[0][d], keys[1][d], keys[2][d], keys[3][d], keys[4][d], keys[5][d], keys[6][d],
                                       keys[7][d]);
        sums = _mm256_fmadd_ps(_mm256_set1_ps(query[d]), column, sums);
    }
    return sums;
}

/* Scores of the eight slots from `slot` on, all in place. */
INLINE __m256 scores_in_place(const float *query, const float *keys, int slot, int dim) {
    const float *rows[8];
    EACH(i, 8) rows[i] = keys + (size_t)slot * dim + (ptrdiff_t)i * dim;
    return eight_scores(query, rows, dim);
}

/* Where the row at a position of a tree's query is; beyond its end any row will do. */
INLINE int slot_at(const Query *query, int position) {
    return position < query->fork || position >= query->end ? position : query->path[position - query->fork];
}

static __m256 scores_on_path(const Query *query, const float *keys, int position, int dim) {
    const float *rows[8];
    EACH(i, 8) rows[i] = keys + (size_t)slot_at(query, position + i) * dim;
    return eight_scores(query->query, rows, dim);
}

/* Lanes of eight slots from `slot` on that lie in [begin, end). */
INLINE __m256 seen_lanes(int slot, int begin, int end) {
    __m256i at = _mm256_add_epi32(_mm256_set1_epi32(slot), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    __m256i early = _mm256_cmpgt_epi32(_mm256_set1_epi32(begin), at);
    return _mm256_castsi256_ps(_mm256_andnot_si256(early, _mm256_cmpgt_epi32(_mm256_set1_epi32(end), at)));
}

/* out [8 * vectors] += weights [slots] times values [slots, dim], with the sums in registers. */
INLINE void add_columns(int vectors, float *out, const float *weights, const float *values, int slots, int dim) {
    __m256 sums[8];
    EACH(i, vectors) sums[i] = _mm256_loadu_ps(out + 8 * i);
    for (int t = 0; t < slots; t++, values += dim) {
        __m256 weight = _mm256_broadcast_ss(weights + t);
        EACH(i, vectors) sums[i] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(values + 8 * i), sums[i]);
    }
    EACH(i, vectors) _mm256_storeu_ps(out + 8 * i, sums[i]);
}

static void add_values(float *out, const float *weights, const float *values, int slots, int dim) {
    int d = 0;
    for (; d + 64 <= dim; d += 64) add_columns(8, out + d, weights, values + d, slots, dim);
    for (; d + 8 <= dim; d += 8) add_columns(1, out + d, weights, values + d, slots, dim);
    for (int t = 0; t < slots; t++) {
        for (int i = d; i < dim; i++) out[i] += weights[t] * values[(size_t)t * dim + i];
    }
}

/* The same for positions [from, to) of a query, wherever their rows are. */
static void add_seen_values(const Query *query, const float *weights, const float *values, int from, int to, int dim) {
    int straight = query->fork < to ? query->fork : to;
    if (from < straight) add_values(query->out, weights, values + (size_t)from * dim, straight - from, dim);
    for (int at = from > straight ? from : straight; at < to; at++) {
        add_values(query->out, weights + at - from, values + (size_t)query->path[at - query->fork] * dim, 1, dim);
    }
}

/* A larger score has come: what was summed up so far weighs less. */
static void raise_top(Query *query, float top, int dim) {
    __m256 factor = exp_lanes(_mm256_set1_ps(query->top - top));
    float each = _mm256_cvtss_f32(factor);
    query->total = _mm256_mul_ps(query->total, factor);
    for (int d = 0; d < dim; d++) query->out[d] *= each;
    query->top = top;
}

/* Adds what a query sees of the span from `span` on. */
static void visit(Query *query, const float *keys, const float *values, int span, int dim) {
    int low = span > query->begin ? span : query->begin, high = span + SPAN < query->end ? span + SPAN : query->end;
    if (low >= high) return;
    float scores[SPAN];
    int first = low & ~7;
    __m256 most = _mm256_set1_ps(-INFINITY);
    for (int slot = first; slot < high; slot += 8) {
        __m256 s = slot + 8 <= query->fork || query->fork >= query->end ? scores_in_place(query->query, keys, slot, dim)
                                                                        : scores_on_path(query, keys, slot, dim);
        s = _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), s, seen_lanes(slot, low, high));
        _mm256_storeu_ps(scores + slot - first, s);
        most = _mm256_max_ps(most, s);
    }
    float top = max_lanes(most);
    if (top > query->top) raise_top(query, top, dim);
    for (int slot = first; slot < high; slot += 8) {
        __m256 weights = exp_lanes(_mm256_sub_ps(_mm256_loadu_ps(scores + slot - first), _mm256_set1_ps(query->top)));
        weights = _mm256_and_ps(seen_lanes(slot, low, high), weights);
        _mm256_storeu_ps(scores + slot - first, weights);
        query->total = _mm256_add_ps(query->total, weights);
    }
    add_seen_values(query, scores + low - first, values, low, high, dim);
}

/* Rows that one task takes. */
int attention_rows(const Run *run) {
    int group = run->shape->heads / run->shape->kv_heads;
    return group < MOST_QUERIES ? MOST_QUERIES / group : 1;
}

/* Attends rows [from, to) of a segment to one key head, with all query heads of its group. */
void attend(const Run *run, int layer, const Segment *segment, int kv_head, int from, int to) {
    const Shape *shape = run->shape;
    int dim = shape->head_dim, group = shape->heads / shape->kv_heads, count = (to - from) * group;
    int window = run->layers[layer].window, first = run->capacity, last = 0;
    size_t head = ((size_t)segment->lane * shape->kv_heads + kv_head) * run->capacity * dim;
    const float *keys = run->keys[layer] + head, *values = run->values[layer] + head;
    Query queries[count];
    for (int i = 0; i < count; i++) {
        int row = from + i / group, column = (kv_head * group + i % group) * dim;
        int end = segment->first_slot + row - segment->begin + 1, fork = end;
        const int32_t *path = NULL;
        if (row >= segment->straight) {
            const int32_t *line = segment->paths + (size_t)(row - segment->straight) * segment->stride;
            fork = segment->fork;
            end = fork + line[0];
            path = line + 1;
        }
        int begin = window && end > window ? end - window : 0;
        queries[i] = (Query){
            .query = run->query + (size_t)row * shape->heads * dim + column,
            .out = run->mixed.values + (size_t)row * run->mixed.padded + column,
            .begin = begin, .end = end, .fork = fork, .path = path, .top = -INFINITY, .total = _mm256_setzero_ps(),
        };
        first = begin < first ? begin : first;
        last = end > last ? end : last;
        for (int d = 0; d < dim; d++) queries[i].out[d] = 0.0f;
    }
    for (int span = first / SPAN * SPAN; span < last; span += SPAN) {
        for (int i = 0; i < count; i++) visit(&queries[i], keys, values, span, dim);
    }
    for (int i = 0; i < count; i++) {
        float factor = 1.0f / sum_lanes(queries[i].total);
        for (int d = 0; d < dim; d++) queries[i].out[d] *= factor;
    }
}
