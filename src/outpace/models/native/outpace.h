/* What the files of this folder share: packed matrices, a team of threads, and a few vector helpers.
 *
 * One rule holds everywhere: what is computed for a row is a fixed sequence of operations on that row alone, whatever
 * other rows, tiles or threads there are. So a row has the same bits in every pack. Compiled with -ffp-contract=off, so
 * that only the fused multiplications written here are fused.
 */
#ifndef OUTPACE_H
#define OUTPACE_H

#include <immintrin.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum { PANEL = 8 };  /* outputs side by side in a packed matrix: the lanes of a vector */
enum { GROUP = 32 }; /* inputs that share a scale */

enum Format { F32, BF16, F16, Q8, Q4, Q6, NUM_FORMATS };

/* A matrix [outputs, inputs] in panels of PANEL outputs, each panel input by input (see matrix.c). */
typedef struct {
    int32_t format, outputs, inputs, padded; /* padded: inputs rounded up to whole groups */
    const uint8_t *panels;
    const float *bias; /* [outputs rounded up to PANEL], or NULL */
} Matrix;

/* Rows [count, padded] entering a product, in the forms its matrices need. */
typedef struct {
    int32_t count, padded, groups;
    float *values;         /* [count, padded], zero beyond the inputs */
    int8_t *bytes;         /* [count, padded]: values / byte_scale, for Q4 and Q6 */
    int16_t *words;        /* [count, padded]: values / word_scale, for Q8 */
    float *byte_scale;     /* [count, groups] */
    float *byte_sum;       /* [count, groups]: byte_scale * sum of the bytes */
    int32_t *half_sums;    /* [count, 2 * groups]: 32 * sum of the bytes of each half of a group, for Q6 */
    float *word_scale;     /* [count, groups] */
} Inputs;

typedef struct {
    _Alignas(64) atomic_int next;    /* first task nobody has taken */
    _Alignas(64) atomic_int arrived; /* members waiting at the end of this phase */
    _Alignas(64) atomic_int turn;    /* phases finished */
} Team;

typedef struct {
    Team *team;
    int size, index, turn;
} Member;

/* A loop of a constant number of passes, unrolled early, so that arrays it indexes become registers. */
#define EACH(i, count) _Pragma("GCC unroll 8") for (int i = 0; i < (count); i++)

#define INLINE static inline __attribute__((always_inline))

/* Runs work(argument, member) once on each of up to `threads` threads of the process's OpenMP pool (torch's). */
void run_team(int threads, void (*work)(void *, Member *), void *argument);

/* Ends a phase: returns when all members are here. */
void meet(Member *member);

static inline int next_task(Member *member) {
    return atomic_fetch_add_explicit(&member->team->next, 1, memory_order_relaxed);
}

size_t panel_bytes(int format, int padded);
void quantise(const Inputs *rows, int row, int first_group, int last_group, int formats);
int product_tasks(const Matrix *matrix);
void product(const Matrix *matrix, const Inputs *rows, int task, float *result, int stride, int add);

static inline int round_up(int number, int multiple) { return (number + multiple - 1) / multiple * multiple; }

static inline float sum_lanes(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

static inline float max_lanes(__m256 v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

/* exp in each lane, relative error below 2e-7: 2^n * p(r) with x = n ln 2 + r, p by Cephes. NaN stays NaN. */
static inline __m256 exp_lanes(__m256 x) {
    x = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(_mm256_set1_ps(-87.3f), x));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

#endif
