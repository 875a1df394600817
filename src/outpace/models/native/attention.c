/* Causal attention of one request's rows over its cache, in float32.
 *
 * Keys and values of a head lie slot by slot. A query passes over its slots in order, eight scores at a time at absolute
 * slots 8i to 8i + 7, and adds up values slot by slot, so its sums do not depend on who else is computed. Slots it must
 * not see never enter a sum: what a rejected draft left behind cannot reach it.
 */
#include <math.h>

#include "layers.h"

enum {
    SPAN = 64,         /* slots whose keys (values) all queries of a task use before the next are fetched */
    MOST_QUERIES = 64, /* of a task, unless a group of heads is larger */
};

typedef struct {
    const float *query; /* [dim] */
    float *out;         /* [dim] */
    float *scores;      /* of slots from begin & ~7 on */
    int begin, end;     /* slots it sees */
    float factor;       /* one over the sum of its weights */
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

/* Turns a query's scores into weights that still lack their factor. */
static void soften(Query *query) {
    const __m256 nothing = _mm256_set1_ps(-INFINITY);
    __m256 most = nothing, total = _mm256_setzero_ps();
    int first = query->begin & ~7;
    for (int slot = first; slot < query->end; slot += 8) {
        __m256 seen = seen_lanes(slot, query->begin, query->end);
        most = _mm256_max_ps(most, _mm256_blendv_ps(nothing, _mm256_loadu_ps(query->scores + slot - first), seen));
    }
    __m256 top = _mm256_set1_ps(max_lanes(most));
    for (int slot = first; slot < query->end; slot += 8) {
        float *at = query->scores + slot - first;
        __m256 weights = exp_lanes(_mm256_sub_ps(_mm256_loadu_ps(at), top));
        weights = _mm256_and_ps(seen_lanes(slot, query->begin, query->end), weights);
        _mm256_storeu_ps(at, weights);
        total = _mm256_add_ps(total, weights);
    }
    query->factor = 1.0f / sum_lanes(total);
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

/* Rows of a segment that one task takes. */
int attention_rows(const Run *run, const Segment *segment) {
    int group = run->shape->heads / run->shape->kv_heads;
    size_t length = (size_t)round_up(segment->first_slot + segment->end - segment->begin, 8) + 8;
    size_t fitting = run->scores_each / (length * (size_t)group);
    size_t most = group < MOST_QUERIES ? MOST_QUERIES / (size_t)group : 1;
    size_t rows = fitting < most ? fitting : most;
    return rows < 1 ? 1 : (int)rows;
}

/* Attends rows [from, to) of a segment to one key head, with all query heads of its group. */
void attend(const Run *run, int layer, const Segment *segment, int kv_head, int from, int to, float *scores) {
    const Shape *shape = run->shape;
    int dim = shape->head_dim, group = shape->heads / shape->kv_heads, count = (to - from) * group;
    int window = run->layers[layer].window;
    size_t head = ((size_t)segment->lane * shape->kv_heads + kv_head) * run->capacity * dim;
    const float *keys = run->keys[layer] + head, *values = run->values[layer] + head;
    Query queries[count];
    int lowest = run->capacity, last = 0;
    for (int i = 0; i < count; i++) {
        int row = from + i / group, column = (kv_head * group + i % group) * dim;
        int end = segment->first_slot + row - segment->begin + 1, begin = window && end > window ? end - window : 0;
        queries[i] = (Query){
            .query = run->query + (size_t)row * shape->heads * dim + column,
            .out = run->mixed.values + (size_t)row * run->mixed.padded + column,
            .scores = scores, .begin = begin, .end = end,
        };
        scores += round_up(end - (begin & ~7), 8);
        lowest = begin < lowest ? begin : lowest;
        last = end > last ? end : last;
        for (int d = 0; d < dim; d++) queries[i].out[d] = 0.0f;
    }
    lowest &= ~7;
    for (int span = lowest; span < last; span += SPAN) {
        for (Query *q = queries; q < queries + count; q++) {
            int first = q->begin & ~7;
            for (int slot = span > first ? span : first; slot < span + SPAN && slot < q->end; slot += 8) {
                _mm256_storeu_ps(q->scores + slot - first, eight_scores(q->query, keys + (size_t)slot * dim, dim));
            }
        }
    }
    for (Query *q = queries; q < queries + count; q++) soften(q);
    for (int span = lowest; span < last; span += SPAN) {
        for (Query *q = queries; q < queries + count; q++) {
            int low = span > q->begin ? span : q->begin, high = span + SPAN < q->end ? span + SPAN : q->end;
            if (low < high) {
                add_values(q->out, q->scores + low - (q->begin & ~7), values + (size_t)low * dim, high - low, dim);
            }
        }
    }
    for (Query *q = queries; q < queries + count; q++) {
        for (int d = 0; d < dim; d++) q->out[d] *= q->factor;
    }
}
