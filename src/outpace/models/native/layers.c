/* Decoder layers of the Llama shape over the cache: norm, query/key/value, rotation, attention, output, norm, gated MLP.
 *
 * One call runs any number of layers. Every member of the team goes through the same phases; the tasks of a phase are
 * taken one by one, and all meet before the next begins.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "layers.h"

enum {
    GROUPS_EACH = 48,        /* groups of a wide row that one task finishes */
    KEPT_BYTES = 4 << 20,    /* scratch up to this size is kept for the next call */
};

#define TASKS(task, member, count) for (int task; (task = next_task(member)) < (count);)

/* x / sqrt(mean(x^2) + epsilon) * weight (arXiv 1910.07467). */
static void normalise(const float *x, const float *weight, int width, float epsilon, float *out) {
    __m256 squares = _mm256_setzero_ps();
    int whole = width & ~7;
    for (int i = 0; i < whole; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        squares = _mm256_fmadd_ps(v, v, squares);
    }
    float sum = sum_lanes(squares);
    for (int i = whole; i < width; i++) sum += x[i] * x[i];
    float mean = sum / (float)width + epsilon;
    float factor = 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean)));
    for (int i = 0; i < width; i++) out[i] = x[i] * factor * weight[i];
}

/* Rotates dimension i with i + dim / 2 (arXiv 2104.09864), after the head's own norm where there is one. */
static void turn_head(const Run *run, const float *norm, const float *turns, float scale, float *head) {
    int dim = run->shape->head_dim, half = dim / 2;
    if (norm) normalise(head, norm, dim, run->shape->epsilon, head);
    for (int i = 0; i < half; i++) {
        float c = turns[2 * i], s = turns[2 * i + 1], a = head[i], b = head[i + half];
        head[i] = (a * c - b * s) * scale;
        head[i + half] = (b * c + a * s) * scale;
    }
}

/* Rotates a row's query and key heads and writes its keys and values to the cache. */
static void place_row(const Run *run, int number, const Segment *segment, int row) {
    const Shape *shape = run->shape;
    const Layer *layer = run->layers + number;
    int dim = shape->head_dim;
    const float *turns = run->turns + (size_t)row * dim;
    for (int h = 0; h < shape->heads; h++) {
        turn_head(run, layer->query_norm, turns, shape->query_scale, run->query + ((size_t)row * shape->heads + h) * dim);
    }
    for (int h = 0; h < shape->kv_heads; h++) {
        size_t from = ((size_t)row * shape->kv_heads + h) * dim;
        size_t slot = segment->first_slot + row - segment->begin;
        size_t to = (((size_t)segment->lane * shape->kv_heads + h) * run->capacity + slot) * dim;
        turn_head(run, layer->key_norm, turns, 1.0f, run->key + from);
        memcpy(run->keys[number] + to, run->key + from, dim * sizeof(float));
        memcpy(run->values[number] + to, run->value + from, dim * sizeof(float));
    }
}

static void place_rows(const Run *run, int layer, Member *member) {
    TASKS(row, member, run->rows) {
        const Segment *segment = run->segment;
        while (row >= segment->end) segment++;
        place_row(run, layer, segment, row);
    }
}

/* Attention of all rows; a task is a few rows of a segment and one key head. */
static void attend_rows(const Run *run, int layer, Member *member) {
    int before = 0, task = next_task(member), each = attention_rows(run);
    for (const Segment *segment = run->segment; segment < run->segment + run->segments; segment++) {
        int parts = (segment->end - segment->begin + each - 1) / each;
        int tasks = parts * run->shape->kv_heads;
        while (task < before + tasks) {
            int from = segment->begin + (task - before) / run->shape->kv_heads * each;
            int to = from + each < segment->end ? from + each : segment->end;
            attend(run, layer, segment, (task - before) % run->shape->kv_heads, from, to);
            task = next_task(member);
        }
        before += tasks;
    }
}

static void norm_rows(const Inputs *rows, const float *hidden, const float *weight, int width, float epsilon, int formats,
                      Member *member) {
    TASKS(row, member, rows->count) {
        normalise(hidden + (size_t)row * width, weight, width, epsilon, rows->values + (size_t)row * rows->padded);
        quantise(rows, row, 0, rows->groups, formats);
    }
}

/* What enters a layer that reads pairs: input_norm of what lies beside, stream_norm of the stream. */
static void join_rows(const Run *run, const Layer *layer, int formats, Member *member) {
    const Inputs *rows = &run->joined;
    int width = run->shape->hidden;
    TASKS(row, member, rows->count) {
        float *values = rows->values + (size_t)row * rows->padded, *stream = run->hidden + (size_t)row * width;
        normalise(run->beside + (size_t)row * width, layer->input_norm, width, run->shape->epsilon, values);
        normalise(stream, layer->stream_norm, width, run->shape->epsilon, values + width);
        if (layer->adds_to_normed) memcpy(stream, values + width, width * sizeof(float));
        quantise(rows, row, 0, rows->groups, formats);
    }
}

typedef struct {
    const Matrix *matrix;
    float *result;
    int stride;
} Product;

/* Several products of the same rows, one after the other without a pause between. */
static void multiply(const Product *products, int count, const Inputs *rows, int add, Member *member) {
    int before = 0, task = next_task(member);
    for (int i = 0; i < count; i++) {
        int tasks = product_tasks(products[i].matrix);
        for (; task < before + tasks; task = next_task(member)) {
            product(products[i].matrix, rows, task - before, products[i].result, products[i].stride, add);
        }
        before += tasks;
    }
}

/* silu(gate) * up, in place of gate, eight at a time over the padded row. */
static void gate_row(float *gate, const float *up, int count) {
    const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
    for (int i = 0; i < count; i += 8) {
        __m256 g = _mm256_loadu_ps(gate + i);
        __m256 silu = _mm256_div_ps(g, _mm256_add_ps(one, exp_lanes(_mm256_xor_ps(g, sign))));
        _mm256_storeu_ps(gate + i, _mm256_mul_ps(silu, _mm256_loadu_ps(up + i)));
    }
}

static void gate_rows(const Run *run, int formats, Member *member) {
    const Inputs *rows = &run->gated;
    int parts = (rows->groups + GROUPS_EACH - 1) / GROUPS_EACH;
    TASKS(task, member, rows->count * parts) {
        int row = task / parts, first = task % parts * GROUPS_EACH;
        int last = first + GROUPS_EACH < rows->groups ? first + GROUPS_EACH : rows->groups;
        size_t at = (size_t)row * rows->padded + (size_t)first * GROUP;
        gate_row(rows->values + at, run->up + at, (last - first) * GROUP);
        quantise(rows, row, first, last, formats);
    }
}

static int formats_of(const Matrix *a, const Matrix *b, const Matrix *c) {
    return 1 << a->format | 1 << b->format | 1 << c->format;
}

/* Leaves only the kept rows, in front, of the states and of what attention found. */
static void drop_rows(Run *run) {
    size_t hidden = run->shape->hidden, mixed = run->mixed.padded;
    for (int i = 0; i < run->kept; i++) {
        memmove(run->hidden + i * hidden, run->hidden + run->keep[i] * hidden, hidden * sizeof(float));
        memmove(run->mixed.values + i * mixed, run->mixed.values + run->keep[i] * mixed, mixed * sizeof(float));
    }
    run->mixed.count = run->normed.count = run->gated.count = run->kept;
}

static void run_layer(Run *run, int number, Member *member) {
    const Layer *layer = run->layers + number;
    const Shape *shape = run->shape;
    int dim = shape->head_dim;
    int entering = formats_of(&layer->query, &layer->key, &layer->value);
    const Inputs *read = run->beside ? &run->joined : &run->normed;
    if (run->beside) {
        join_rows(run, layer, entering, member);
    } else {
        norm_rows(&run->normed, run->hidden, layer->input_norm, shape->hidden, shape->epsilon, entering, member);
    }
    meet(member);
    Product heads[] = {
        {&layer->query, run->query, shape->heads * dim},
        {&layer->key, run->key, shape->kv_heads * dim},
        {&layer->value, run->value, shape->kv_heads * dim},
    };
    multiply(heads, 3, read, 0, member);
    meet(member);
    place_rows(run, number, member);
    meet(member);
    attend_rows(run, number, member);
    meet(member);
    if (run->keep && number == run->end - 1) {
        if (member->index == 0) drop_rows(run);
        meet(member);
    }
    int out = formats_of(&layer->out, &layer->out, &layer->out);
    TASKS(row, member, run->mixed.count) quantise(&run->mixed, row, 0, run->mixed.groups, out);
    meet(member);
    Product mixed[] = {{&layer->out, run->hidden, shape->hidden}};
    multiply(mixed, 1, &run->mixed, 1, member);
    meet(member);
    int gating = formats_of(&layer->gate, &layer->up, &layer->up);
    norm_rows(&run->normed, run->hidden, layer->mlp_norm, shape->hidden, shape->epsilon, gating, member);
    meet(member);
    Product wide[] = {
        {&layer->gate, run->gated.values, run->gated.padded},
        {&layer->up, run->up, run->gated.padded},
    };
    multiply(wide, 2, &run->normed, 0, member);
    meet(member);
    gate_rows(run, formats_of(&layer->down, &layer->down, &layer->down), member);
    meet(member);
    Product down[] = {{&layer->down, run->hidden, shape->hidden}};
    multiply(down, 1, &run->gated, 1, member);
    meet(member);
}

static void run_member(void *data, Member *member) {
    Run *run = data;
    size_t bytes = (size_t)run->rows * run->shape->hidden * sizeof(float);
    for (int number = run->begin; number < run->end; number++) {
        if (run->entering && run->entering[number] && member->index == 0) {
            memcpy(run->entering[number], run->hidden, bytes);
        }
        run_layer(run, number, member);
    }
    if (run->entering && run->entering[run->end] && member->index == 0) {
        memcpy(run->entering[run->end], run->hidden, bytes);
    }
}

/* Memory handed out piece by piece; asked for once with no memory to learn the size. */
typedef struct {
    char *memory;
    size_t used;
} Arena;

static void *take(Arena *arena, size_t bytes) {
    void *piece = arena->memory ? arena->memory + arena->used : NULL;
    arena->used += (bytes + 63) / 64 * 64;
    return piece;
}

static Inputs take_inputs(Arena *arena, int count, int width) {
    Inputs rows = {.count = count, .padded = round_up(width, GROUP)};
    rows.groups = rows.padded / GROUP;
    size_t numbers = (size_t)count * rows.padded, groups = (size_t)count * rows.groups;
    rows.values = take(arena, numbers * sizeof(float));
    rows.bytes = take(arena, numbers);
    rows.words = take(arena, numbers * sizeof(int16_t));
    rows.byte_scale = take(arena, groups * sizeof(float));
    rows.byte_sum = take(arena, groups * sizeof(float));
    rows.half_sums = take(arena, 2 * groups * sizeof(int32_t));
    rows.word_scale = take(arena, groups * sizeof(float));
    return rows;
}

static void clear_padding(float *values, int rows, int width, int padded) {
    for (int row = 0; row < rows && width < padded; row++) {
        memset(values + (size_t)row * padded + width, 0, (size_t)(padded - width) * sizeof(float));
    }
}

static void lay_out(Run *run, Arena *arena) {
    const Shape *shape = run->shape;
    size_t rows = run->rows;
    run->joined = take_inputs(arena, run->beside ? run->rows : 0, 2 * shape->hidden);
    run->normed = take_inputs(arena, run->rows, shape->hidden);
    run->mixed = take_inputs(arena, run->rows, shape->heads * shape->head_dim);
    run->gated = take_inputs(arena, run->rows, shape->wide);
    run->query = take(arena, rows * shape->heads * shape->head_dim * sizeof(float));
    run->key = take(arena, rows * shape->kv_heads * shape->head_dim * sizeof(float));
    run->value = take(arena, rows * shape->kv_heads * shape->head_dim * sizeof(float));
    run->up = take(arena, rows * run->gated.padded * sizeof(float));
}

static pthread_key_t kept;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_key(void) { pthread_key_create(&kept, free); }

/* Scratch of at least this size, and whether it is the caller's to free; a small one is the thread's until it ends. */
static char *scratch(size_t bytes, int *owned) {
    *owned = bytes > KEPT_BYTES;
    if (*owned) return aligned_alloc(64, (bytes + 63) / 64 * 64);
    pthread_once(&once, make_key);
    char *memory = pthread_getspecific(kept);
    if (!memory) {
        memory = aligned_alloc(64, KEPT_BYTES);
        pthread_setspecific(kept, memory);
    }
    return memory;
}

/* Runs layers [begin, end) and writes their cache rows. 0, or -1 if there is no memory. */
int run_layers(Run *run) {
    Arena arena = {0};
    lay_out(run, &arena);
    int owned;
    char *memory = scratch(arena.used, &owned);
    if (!memory) return -1;
    arena = (Arena){memory, 0};
    lay_out(run, &arena);
    const Shape *shape = run->shape;
    clear_padding(run->joined.values, run->joined.count, 2 * shape->hidden, run->joined.padded);
    clear_padding(run->normed.values, run->rows, shape->hidden, run->normed.padded);
    clear_padding(run->mixed.values, run->rows, shape->heads * shape->head_dim, run->mixed.padded);
    clear_padding(run->gated.values, run->rows, shape->wide, run->gated.padded);
    clear_padding(run->up, run->rows, shape->wide, run->gated.padded);
    run_team(run->threads, run_member, run);
    if (owned) free(memory);
    return 0;
}

typedef struct {
    const float *norm, *hidden;
    float epsilon;
    const Matrix *head;
    Inputs rows;
    float *logits;
} Head;

static void head_member(void *data, Member *member) {
    Head *head = data;
    int width = head->head->inputs;
    norm_rows(&head->rows, head->hidden, head->norm, width, head->epsilon, 1 << head->head->format, member);
    meet(member);
    Product logits[] = {{head->head, head->logits, head->head->outputs}};
    multiply(logits, 1, &head->rows, 0, member);
}

/* Final norm and output head: hidden [rows, inputs] -> logits [rows, outputs]. 0, or -1 if there is no memory. */
int run_head(const float *norm, float epsilon, const Matrix *matrix, const float *hidden, int rows, float *logits, int threads) {
    Arena arena = {0};
    take_inputs(&arena, rows, matrix->inputs);
    int owned;
    char *memory = scratch(arena.used, &owned);
    if (!memory) return -1;
    arena = (Arena){memory, 0};
    Head head = {norm, hidden, epsilon, matrix, take_inputs(&arena, rows, matrix->inputs), logits};
    clear_padding(head.rows.values, rows, matrix->inputs, head.rows.padded);
    run_team(threads, head_member, &head);
    if (owned) free(memory);
    return 0;
}
