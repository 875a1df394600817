/* Causal attention of one request's rows over its cache, in float32.
 *
 * Keys and values of a head lie slot by slot. A query passes over its slots in order, in spans at absolute multiples of
 * SPAN, with a running maximum (arXiv 2205.14135): scores of eight slots at a time, weights, then the values slot by
 * slot. All queries of a task visit a span while it is in the first-level cache. What a query computes does not
 * depend on who else is computed, and slots it must not see never enter a sum: what a rejected draft left behind cannot
 * reach it.
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
    int begin, end;     /* slots it sees */
    float top;          /* largest score so far */
    __m256 total;       /* weights so far, slot i in lane i % 8 */
} Query;

/* Scores of eight slots: query [dim] times keys [8, dim]. */
INLINE __m256 eight_scores(const float *query, const float *keys, int dim) {
    __m256 s[8];
    EACH(i, 8) s[i] = _mm256_setzero_ps();
    int whole = dim & ~7;
    for (int d = 0; d < whole; d += 8) {
        __m256 part = _mm256_loadu_ps(query + d);
        EACH(i, 8) s[i] = _mm256_fmadd_ps(part, _mm256_loadu_ps(keys + (ptrdiff_t)i * dim + d), s[i]);
    }
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(s[0], s[1]), _mm256_hadd_ps(s[2], s[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(s[4], s[5]), _mm256_hadd_ps(s[6], s[7]));
    __m256 sums = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    for (int d = whole; d < dim; d++) {
        const float *k = keys + d;
        __m256 column = _mm256_setr_ps(k[0], k[dim], k[2 * dim], k[3 * dim], k[4 * dim], k[5 * dim], k[6 * dim], k[7 * dim]);
        sums = _mm256_fmadd_ps(_mm256_set1_ps(query[d]), column, sums);
    }
    return sums;
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
        __m256 s = eight_scores(query->query, keys + (size_t)slot * dim, dim);
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
    add_values(query->out, scores + low - first, values + (size_t)low * dim, high - low, dim);
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
    int window = run->layers[layer].window, last = segment->first_slot + to - segment->begin;
    size_t head = ((size_t)segment->lane * shape->kv_heads + kv_head) * run->capacity * dim;
    const float *keys = run->keys[layer] + head, *values = run->values[layer] + head;
    Query queries[count];
    for (int i = 0; i < count; i++) {
        int row = from + i / group, column = (kv_head * group + i % group) * dim;
        int end = segment->first_slot + row - segment->begin + 1, begin = window && end > window ? end - window : 0;
        queries[i] = (Query){
            .query = run->query + (size_t)row * shape->heads * dim + column,
            .out = run->mixed.values + (size_t)row * run->mixed.padded + column,
            .begin = begin, .end = end, .top = -INFINITY, .total = _mm256_setzero_ps(),
        };
        for (int d = 0; d < dim; d++) queries[i].out[d] = 0.0f;
    }
    for (int span = queries[0].begin / SPAN * SPAN; span < last; span += SPAN) {
        for (int i = 0; i < count; i++) visit(&queries[i], keys, values, span, dim);
    }
    for (int i = 0; i < count; i++) {
        float factor = 1.0f / sum_lanes(queries[i].total);
        for (int d = 0; d < dim; d++) queries[i].out[d] *= factor;
    }
}
