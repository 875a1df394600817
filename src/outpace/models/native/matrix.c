/* Products of rows with packed matrices: y = x W^T + b, for one row to hundreds.
 *
 * A panel holds PANEL outputs. One vector of it carries, for each of them, 1, 2 or 4 neighbouring inputs, so that sums
 * stay in their lanes and nothing is added across a vector:
 *
 *   F32   per input:   8 floats
 *   BF16  per input:   8 halves (the upper half of a float)
 *   F16   per input:   8 halves (IEEE)
 *   Q8    per group:  16 x [8 outputs x 2 inputs] signed bytes, 8 scales (F16): 8.5 bits a weight. Rows enter with 16
 *                     bits: the products of pairs fit 32-bit sums, and cost what 8 bits cost.
 *   Q4    per group:   4 x [8 outputs x 4 inputs], inputs 4j.. in the low and 16 + 4j.. in the high halves of the bytes,
 *                     8 scales, 8 minima (F16): 5 bits a weight, weight = scale * number - minimum. Rows enter with 8
 *                     bits: 8 * 2 * 15 * 127 fits the 16-bit sums of a group.
 *   Q6    per group:   as Q4, then 2 x 32 bytes with two more bits of each number (bits 2j of a byte belong to inputs 4j..
 *                     of the group's first or second half), 2 x 8 scales (F16), one a half: 7 bits a weight,
 *                     weight = scale * (number - 32). Rows enter with 8 bits; two products of pairs fit a 16-bit sum.
 *
 * Integer sums are exact; each group then adds once, in order, to a float sum of its row and output.
 */
#include <string.h>

#include "outpace.h"

enum {
    TILE = 5,               /* rows computed together: their sums and the weights stay in registers */
    TASK_BYTES = 24 << 10,  /* weights of one task */
    AHEAD_BYTES = 4 << 10,
    BLOCK_BYTES = 96 << 10, /* rows that stay in the second-level cache while a task's panels pass over them */
};

size_t panel_bytes(int format, int padded) {
    size_t groups = (size_t)padded / GROUP;
    switch (format) {
    case F32: return (size_t)padded * PANEL * 4;
    case BF16:
    case F16: return (size_t)padded * PANEL * 2;
    case Q8: return groups * (GROUP * PANEL + 2 * PANEL);
    case Q4: return groups * (GROUP * PANEL / 2 + 4 * PANEL);
    case Q6: return groups * (GROUP * PANEL * 3 / 4 + 4 * PANEL);
    default: return 0;
    }
}

INLINE __m256 halves(const uint8_t *at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }

INLINE __m256i four_bytes(const void *at) {
    int32_t value;
    memcpy(&value, at, 4);
    return _mm256_set1_epi32(value);
}

INLINE __m256 load_weights(int format, const uint8_t *at) {
    if (format == F32) return _mm256_loadu_ps((const float *)at);
    if (format == F16) return halves(at);
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

/* Two chains of sums a row, even and odd inputs, so that one addition need not wait for the other. */
INLINE void float_tile(int format, int tile, const uint8_t *w, const Inputs *rows, int first, __m256 *sums) {
    const int step = format == F32 ? 32 : 16;
    const float *x[TILE];
    __m256 even[TILE], odd[TILE]; /* not `sums`, which might be where the weights are for all a compiler knows */
    EACH(r, tile) {
        x[r] = rows->values + (size_t)(first + r) * rows->padded;
        even[r] = odd[r] = _mm256_setzero_ps();
    }
    for (ptrdiff_t k = 0, padded = rows->padded; k < padded; k += 2, w += 2 * step) {
        __m256 even_weights = load_weights(format, w), odd_weights = load_weights(format, w + step);
        EACH(r, tile) {
            even[r] = _mm256_fmadd_ps(even_weights, _mm256_broadcast_ss(x[r] + k), even[r]);
            odd[r] = _mm256_fmadd_ps(odd_weights, _mm256_broadcast_ss(x[r] + k + 1), odd[r]);
        }
    }
    EACH(r, tile) sums[r] = _mm256_add_ps(even[r], odd[r]);
}

/* Asks for the weights that are needed some groups later, if this is the first tile to read them. */
INLINE void fetch_ahead(const uint8_t *w, int bytes, int first) {
    for (int line = 0; first == 0 && line < bytes; line += 64) {
        _mm_prefetch((const char *)w + AHEAD_BYTES + line, _MM_HINT_T0);
    }
}

INLINE void q8_tile(int tile, const uint8_t *w, const Inputs *rows, int first, __m256 *sums) {
    const int16_t *x[TILE];
    const float *scale[TILE];
    __m256 kept[TILE];
    EACH(r, tile) {
        x[r] = rows->words + (size_t)(first + r) * rows->padded;
        scale[r] = rows->word_scale + (size_t)(first + r) * rows->groups;
        kept[r] = _mm256_setzero_ps();
    }
    for (ptrdiff_t g = 0, groups = rows->groups; g < groups; g++, w += GROUP * PANEL + 2 * PANEL) {
        fetch_ahead(w, GROUP * PANEL + 2 * PANEL, first);
        __m256i whole[TILE];
        EACH(r, tile) whole[r] = _mm256_setzero_si256();
        _Pragma("GCC unroll 4") for (ptrdiff_t j = 0; j < GROUP / 2; j++) {
            __m256i weights = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + 16 * j)));
            EACH(r, tile) {
                __m256i pair = four_bytes(x[r] + g * GROUP + 2 * j);
                whole[r] = _mm256_add_epi32(whole[r], _mm256_madd_epi16(weights, pair));
            }
        }
        __m256 scales = halves(w + GROUP * PANEL);
        EACH(r, tile) {
            __m256 both = _mm256_mul_ps(scales, _mm256_broadcast_ss(scale[r] + g));
            kept[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[r]), both, kept[r]);
        }
    }
    EACH(r, tile) sums[r] = kept[r];
}

INLINE void q4_tile(int tile, const uint8_t *w, const Inputs *rows, int first, __m256 *sums) {
    const int8_t *x[TILE];
    const float *scale[TILE], *total[TILE];
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256 kept[TILE];
    EACH(r, tile) {
        x[r] = rows->bytes + (size_t)(first + r) * rows->padded;
        scale[r] = rows->byte_scale + (size_t)(first + r) * rows->groups;
        total[r] = rows->byte_sum + (size_t)(first + r) * rows->groups;
        kept[r] = _mm256_setzero_ps();
    }
    for (ptrdiff_t g = 0, groups = rows->groups; g < groups; g++, w += GROUP * PANEL / 2 + 4 * PANEL) {
        fetch_ahead(w, GROUP * PANEL / 2 + 4 * PANEL, first);
        __m256i half[TILE];
        EACH(r, tile) half[r] = _mm256_setzero_si256();
        for (ptrdiff_t j = 0; j < GROUP / 8; j++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(w + 32 * j));
            __m256i lower = _mm256_and_si256(both, low), upper = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
            EACH(r, tile) {
                const int8_t *at = x[r] + g * GROUP + 4 * j;
                half[r] = _mm256_add_epi16(half[r], _mm256_maddubs_epi16(lower, four_bytes(at)));
                half[r] = _mm256_add_epi16(half[r], _mm256_maddubs_epi16(upper, four_bytes(at + GROUP / 2)));
            }
        }
        __m256 scales = halves(w + GROUP * PANEL / 2), minima = halves(w + GROUP * PANEL / 2 + 2 * PANEL);
        EACH(r, tile) {
            __m256 sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(half[r], ones));
            kept[r] = _mm256_fmadd_ps(sum, _mm256_mul_ps(scales, _mm256_broadcast_ss(scale[r] + g)), kept[r]);
            kept[r] = _mm256_fnmadd_ps(minima, _mm256_broadcast_ss(total[r] + g), kept[r]);
        }
    }
    EACH(r, tile) sums[r] = kept[r];
}

/* Numbers 4j.. of one half of a group: four bits here, two there. `j` is a constant. */
INLINE __m256i six_bits(__m256i low, __m256i high, int j) {
    __m256i moved = j == 0 ? _mm256_slli_epi16(high, 4) : j == 1 ? _mm256_slli_epi16(high, 2)
        : j == 2 ? high : _mm256_srli_epi16(high, 2);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)));
}

INLINE void q6_tile(int tile, const uint8_t *w, const Inputs *rows, int first, __m256 *sums) {
    const int8_t *x[TILE];
    const float *scale[TILE];
    const int32_t *half_sums[TILE];
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256 kept[TILE];
    EACH(r, tile) {
        x[r] = rows->bytes + (size_t)(first + r) * rows->padded;
        scale[r] = rows->byte_scale + (size_t)(first + r) * rows->groups;
        half_sums[r] = rows->half_sums + (size_t)(first + r) * rows->groups * 2;
        kept[r] = _mm256_setzero_ps();
    }
    for (ptrdiff_t g = 0, groups = rows->groups; g < groups; g++, w += GROUP * PANEL * 3 / 4 + 4 * PANEL) {
        fetch_ahead(w, GROUP * PANEL * 3 / 4 + 4 * PANEL, first);
        EACH(h, 2) {
            __m256i high = _mm256_loadu_si256((const __m256i *)(w + GROUP * PANEL / 2 + 32 * h)), n[4];
            EACH(j, 4) {
                __m256i both = _mm256_loadu_si256((const __m256i *)(w + 32 * j));
                n[j] = six_bits(_mm256_and_si256(h ? _mm256_srli_epi16(both, 4) : both, low), high, j);
            }
            __m256 scales = halves(w + GROUP * PANEL * 3 / 4 + 2 * PANEL * h);
            EACH(r, tile) {
                const int8_t *at = x[r] + g * GROUP + GROUP / 2 * h;
                __m256i a = _mm256_add_epi16(_mm256_maddubs_epi16(n[0], four_bytes(at)), _mm256_maddubs_epi16(n[1], four_bytes(at + 4)));
                __m256i b = _mm256_add_epi16(_mm256_maddubs_epi16(n[2], four_bytes(at + 8)), _mm256_maddubs_epi16(n[3], four_bytes(at + 12)));
                __m256i whole = _mm256_add_epi32(_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones));
                whole = _mm256_sub_epi32(whole, _mm256_set1_epi32(half_sums[r][2 * g + h]));
                __m256 both = _mm256_mul_ps(scales, _mm256_broadcast_ss(scale[r] + g));
                kept[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), both, kept[r]);
            }
        }
    }
    EACH(r, tile) sums[r] = kept[r];
}

/* `tile` is a constant at every call, so that each size becomes its own loop over registers. */
INLINE void any_tile(int format, int tile, const uint8_t *w, const Inputs *rows, int first, __m256 *sums) {
    if (format == Q4) q4_tile(tile, w, rows, first, sums);
    else if (format == Q6) q6_tile(tile, w, rows, first, sums);
    else if (format == Q8) q8_tile(tile, w, rows, first, sums);
    else float_tile(format, tile, w, rows, first, sums);
}

#define TILES(format)                                                                                                  \
    static void tiles_##format(int tile, const uint8_t *w, const Inputs *rows, int first, __m256 *sums) {              \
        switch (tile) {                                                                                                \
        case 1: any_tile(format, 1, w, rows, first, sums); break;                                                      \
        case 2: any_tile(format, 2, w, rows, first, sums); break;                                                      \
        case 3: any_tile(format, 3, w, rows, first, sums); break;                                                      \
        case 4: any_tile(format, 4, w, rows, first, sums); break;                                                      \
        default: any_tile(format, 5, w, rows, first, sums);                                                            \
        }                                                                                                              \
    }
TILES(F32)
TILES(BF16)
TILES(F16)
TILES(Q8)
TILES(Q4)
TILES(Q6)

typedef void (*Tiles)(int, const uint8_t *, const Inputs *, int, __m256 *);
static const Tiles TILES_OF[NUM_FORMATS] = {tiles_F32, tiles_BF16, tiles_F16, tiles_Q8, tiles_Q4, tiles_Q6};

static int task_panels(const Matrix *matrix) {
    int fitting = (int)(TASK_BYTES / panel_bytes(matrix->format, matrix->padded));
    return fitting < 1 ? 1 : fitting;
}

/* Into how many tasks a product is divided. */
int product_tasks(const Matrix *matrix) {
    int panels = (matrix->outputs + PANEL - 1) / PANEL, each = task_panels(matrix);
    return (panels + each - 1) / each;
}

INLINE void store(const Matrix *matrix, int panel, __m256 sum, float *at, int add) {
    int left = matrix->outputs - panel * PANEL;
    if (matrix->bias) sum = _mm256_add_ps(sum, _mm256_loadu_ps(matrix->bias + panel * PANEL));
    if (left >= PANEL) {
        _mm256_storeu_ps(at, add ? _mm256_add_ps(_mm256_loadu_ps(at), sum) : sum);
        return;
    }
    float lanes[PANEL];
    _mm256_storeu_ps(lanes, sum);
    for (int i = 0; i < left; i++) at[i] = add ? at[i] + lanes[i] : lanes[i];
}

/* One task of a product: result [rows, outputs] with `stride` floats a row; `add` adds to what is there. */
void product(const Matrix *matrix, const Inputs *rows, int task, float *result, int stride, int add) {
    Tiles tiles = TILES_OF[matrix->format];
    size_t bytes = panel_bytes(matrix->format, matrix->padded);
    int each = task_panels(matrix), panels = (matrix->outputs + PANEL - 1) / PANEL;
    int begin = task * each, end = begin + each < panels ? begin + each : panels;
    int block = (int)(BLOCK_BYTES / ((size_t)rows->padded * (matrix->format >= Q4 ? 1 : matrix->format == Q8 ? 2 : 4)));
    block = block < TILE ? TILE : block / TILE * TILE;
    for (int top = 0; top < rows->count; top += block) {
        int bottom = top + block < rows->count ? top + block : rows->count;
        for (int panel = begin; panel < end; panel++) {
            const uint8_t *w = matrix->panels + bytes * (size_t)panel;
            for (int first = top, tile; first < bottom; first += tile) {
                __m256 sums[TILE];
                int left = bottom - first, tiles_left = (left + TILE - 1) / TILE;
                tile = (left + tiles_left - 1) / tiles_left; /* as even as can be: one row alone costs half of four */
                tiles(tile, w, rows, first, sums);
                EACH(r, tile) {
                    store(matrix, panel, sums[r], result + (size_t)(first + r) * stride + panel * PANEL, add);
                }
            }
        }
    }
}

/* Largest magnitude of a group; NaN if anything in it is not finite, so that such a row stays recognisable. */
INLINE float largest(const float *x) {
    __m256 most = _mm256_setzero_ps(), odd = _mm256_setzero_ps(), sign = _mm256_set1_ps(-0.0f);
    for (int i = 0; i < GROUP; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        most = _mm256_max_ps(most, _mm256_andnot_ps(sign, v));
        odd = _mm256_fmadd_ps(v, _mm256_setzero_ps(), odd);
    }
    return max_lanes(most) + sum_lanes(odd);
}

/* Rounds eight values times a factor to integers. */
INLINE __m256i rounded(const float *x, float factor) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(factor)));
}

/* Sixteen values as 16-bit integers, in order. */
INLINE __m256i rounded_words(const float *x, float factor) {
    __m256i words = _mm256_packs_epi32(rounded(x, factor), rounded(x + 8, factor));
    return _mm256_permute4x64_epi64(words, 0xD8);
}

/* Sum of four whole numbers: exact. */
INLINE float sum_four(__m128i numbers) {
    __m128 s = _mm_cvtepi32_ps(numbers);
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* Fills in the integer forms of groups [first, last) of a row that `formats` (bits 1 << Format) need. */
void quantise(const Inputs *rows, int row, int first_group, int last_group, int formats) {
    const float tiny = 1e-30f; /* a group this small becomes zeros: its inverse would overflow */
    size_t at = (size_t)row * rows->padded, group = (size_t)row * rows->groups;
    for (int g = first_group; g < last_group; g++) {
        const float *x = rows->values + at + (size_t)g * GROUP;
        float most = largest(x);
        float usable = most < tiny ? 0.0f : most;
        if (formats & 1 << Q8) {
            float factor = most < tiny ? 0.0f : 32767.0f / most;
            int16_t *words = rows->words + at + (size_t)g * GROUP;
            for (int i = 0; i < GROUP; i += 16) {
                _mm256_storeu_si256((__m256i *)(words + i), rounded_words(x + i, factor));
            }
            rows->word_scale[group + g] = usable / 32767.0f;
        }
        if (formats & (1 << Q4 | 1 << Q6)) {
            float factor = most < tiny ? 0.0f : 127.0f / most;
            __m256i packed = _mm256_packs_epi16(rounded_words(x, factor), rounded_words(x + 16, factor));
            packed = _mm256_permute4x64_epi64(packed, 0xD8);
            _mm256_storeu_si256((__m256i *)(rows->bytes + at + (size_t)g * GROUP), packed);
            __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), packed);
            __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            float first = sum_four(_mm256_castsi256_si128(fours)), second = sum_four(_mm256_extracti128_si256(fours, 1));
            rows->half_sums[2 * (group + g)] = 32 * (int32_t)first;
            rows->half_sums[2 * (group + g) + 1] = 32 * (int32_t)second;
            rows->byte_scale[group + g] = usable / 127.0f;
            rows->byte_sum[group + g] = usable / 127.0f * (first + second);
        }
    }
}
