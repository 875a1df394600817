/* Packing: rows of a checkpoint, floats or the blocks of a GGUF file, into panels (see matrix.c).
 *
 * Blocks of at most six bits keep their numbers, and their scales in F16 (those of K blocks are products and rounded, by
 * 2^-11 at most); Q8 takes each group's largest magnitude as 127, which leaves
 * the values of Q8_0 as they are. Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "outpace.h"

enum Source { FROM_F32, FROM_F16, FROM_BF16, FROM_Q4_0, FROM_Q4_1, FROM_Q5_0, FROM_Q8_0, FROM_Q4_K, FROM_Q6_K };

typedef struct {
    int32_t source, format, outputs, inputs, padded, threads;
    size_t row_bytes;
    const uint8_t *rows; /* [outputs] rows of row_bytes */
    uint8_t *panels;
    atomic_int failed;
} Packing;

/* A row taken apart: weights, and where it is stored in them numbers of four bits with a scale and a minimum a group, or
 * of six bits with a scale every half group. */
typedef struct {
    float *weights;         /* [padded] */
    uint8_t *numbers;       /* [padded] */
    float *scale, *minimum; /* [groups] */
    float *half_scale;      /* [2 * groups] */
} Row;

static int new_row(Row *row, int padded) {
    int groups = padded / GROUP;
    float *memory = calloc((size_t)padded + 4 * (size_t)groups, sizeof(float));
    *row = (Row){memory, calloc((size_t)padded, 1), NULL, NULL, NULL};
    if (memory) {
        row->scale = memory + padded;
        row->minimum = row->scale + groups;
        row->half_scale = row->minimum + groups;
    }
    return memory && row->numbers;
}

static float half(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    return _cvtsh_ss(bits);
}

static void put_half(uint8_t *at, float value) {
    uint16_t bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
    memcpy(at, &bits, 2);
}

/* A float's upper half, rounded to the nearest, ties to even; NaN stays NaN. */
static void put_upper_half(uint8_t *at, float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = value != value ? bits | 1u << 22 : bits + 0x7fff + (bits >> 16 & 1);
    at[0] = (uint8_t)(bits >> 16);
    at[1] = (uint8_t)(bits >> 24);
}

/* Sum of a group that is NaN if anything in it is not finite, else 0: added to a scale, it keeps damage visible. */
static float damage(const float *weights) {
    float sum = 0.0f;
    for (int i = 0; i < GROUP; i++) sum += weights[i] * 0.0f;
    return sum;
}

/* A weight over its scale, rounded, within [least, most]; `least` for what is no number. */
static int whole(float weight, float scale, int least, int most) {
    float number = scale > 0.0f ? rintf(weight / scale) : 0.0f;
    return !(number >= (float)least) ? least : number > (float)most ? most : (int)number;
}

/* Number i of 32 whose halves lie in 16 bytes: the first 16 low, the rest high. */
static int nibble(const uint8_t *at, int i) { return i < 16 ? at[i] & 15 : at[i - 16] >> 4; }

static void weights_of_q4(Row *row, int g, const uint8_t *numbers, float scale, float minimum) {
    for (int i = 0; i < GROUP; i++) row->numbers[g * GROUP + i] = nibble(numbers, i);
    row->scale[g] = scale;
    row->minimum[g] = minimum;
}

/* 256 weights: two halves, 8 scales and minima of 6 bits in 12 bytes, then 4 times 64 numbers, low halves first. */
static void open_q4_k(Row *row, int block, const uint8_t *at) {
    float scale = half(at), minimum = half(at + 2);
    const uint8_t *packed = at + 4, *numbers = at + 16;
    for (int s = 0; s < 8; s++) {
        int a = s < 4 ? packed[s] & 63 : (packed[s + 4] & 15) | (packed[s - 4] >> 6) << 4;
        int b = s < 4 ? packed[s + 4] & 63 : packed[s + 4] >> 4 | (packed[s] >> 6) << 4;
        int g = block * 8 + s;
        for (int i = 0; i < GROUP; i++) {
            uint8_t byte = numbers[s / 2 * 32 + i];
            row->numbers[g * GROUP + i] = s % 2 ? byte >> 4 : byte & 15;
        }
        row->scale[g] = scale * (float)a;
        row->minimum[g] = minimum * (float)b;
    }
}

/* 256 weights: 128 bytes of low four bits, 64 of high two bits, 16 signed scales, a half. */
static void open_q6_k(Row *row, int block, const uint8_t *at) {
    const int8_t *scales = (const int8_t *)(at + 192);
    for (int s = 0; s < 16; s++) row->half_scale[block * 16 + s] = half(at + 208) * (float)scales[s];
    for (int part = 0; part < 2; part++) {
        const uint8_t *low = at + part * 64, *high = at + 128 + part * 32;
        uint8_t *numbers = row->numbers + block * 256 + part * 128;
        for (int i = 0; i < 32; i++) {
            numbers[i] = (uint8_t)((low[i] & 15) | (high[i] & 3) << 4);
            numbers[i + 32] = (uint8_t)((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
            numbers[i + 64] = (uint8_t)(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
            numbers[i + 96] = (uint8_t)(low[i + 32] >> 4 | (high[i] >> 6 & 3) << 4);
        }
    }
}

static void open_q5_0(Row *row, int g, const uint8_t *at) {
    uint32_t high;
    memcpy(&high, at + 2, 4);
    row->half_scale[2 * g] = row->half_scale[2 * g + 1] = half(at);
    for (int i = 0; i < GROUP; i++) {
        row->numbers[g * GROUP + i] = (uint8_t)((nibble(at + 6, i) | (int)(high >> i & 1) << 4) + 16);
    }
}

static void open_floats(const Packing *p, const uint8_t *at, float *weights) {
    for (int i = 0; i < p->inputs; i++) {
        if (p->source == FROM_F32) memcpy(weights + i, at + 4 * (size_t)i, 4);
        else if (p->source == FROM_F16) weights[i] = half(at + 2 * (size_t)i);
        else {
            uint32_t bits = (uint32_t)at[2 * (size_t)i] << 16 | (uint32_t)at[2 * (size_t)i + 1] << 24;
            memcpy(weights + i, &bits, 4);
        }
    }
}

static int has_four_bits(int source) { return source == FROM_Q4_0 || source == FROM_Q4_1 || source == FROM_Q4_K; }

static int has_six_bits(int source) { return source == FROM_Q5_0 || source == FROM_Q6_K; }

static void open_row(const Packing *p, const uint8_t *at, Row *row) {
    int groups = p->inputs / GROUP, blocks = p->inputs / 256;
    switch (p->source) {
    case FROM_Q4_0:
        for (int g = 0; g < groups; g++, at += 18) weights_of_q4(row, g, at + 2, half(at), 8.0f * half(at));
        break;
    case FROM_Q4_1:
        for (int g = 0; g < groups; g++, at += 20) weights_of_q4(row, g, at + 4, half(at), -half(at + 2));
        break;
    case FROM_Q4_K:
        for (int b = 0; b < blocks; b++, at += 144) open_q4_k(row, b, at);
        break;
    case FROM_Q5_0:
        for (int g = 0; g < groups; g++, at += 22) open_q5_0(row, g, at);
        break;
    case FROM_Q6_K:
        for (int b = 0; b < blocks; b++, at += 210) open_q6_k(row, b, at);
        break;
    case FROM_Q8_0:
        for (int g = 0; g < groups; g++, at += 34) {
            for (int i = 0; i < GROUP; i++) row->weights[g * GROUP + i] = half(at) * (float)(int8_t)at[2 + i];
        }
        break;
    default: open_floats(p, at, row->weights);
    }
    if (has_four_bits(p->source)) {
        for (int i = 0; i < p->inputs; i++) {
            row->weights[i] = row->scale[i / GROUP] * (float)row->numbers[i] - row->minimum[i / GROUP];
        }
    }
    for (int i = 0; i < p->inputs && has_six_bits(p->source); i++) {
        row->weights[i] = row->half_scale[i / (GROUP / 2)] * (float)(row->numbers[i] - 32);
    }
}

/* Four bits for a group of floats: the numbers run from its least to its largest weight, 0 included. */
static void number_group(Row *row, int g) {
    const float *w = row->weights + g * GROUP;
    float least = 0.0f, most = 0.0f;
    for (int i = 0; i < GROUP; i++) {
        least = w[i] < least ? w[i] : least;
        most = w[i] > most ? w[i] : most;
    }
    float scale = _cvtsh_ss(_cvtss_sh((most - least) / 15.0f, _MM_FROUND_TO_NEAREST_INT)) + damage(w);
    float minimum = _cvtsh_ss(_cvtss_sh(-least, _MM_FROUND_TO_NEAREST_INT));
    for (int i = 0; i < GROUP; i++) {
        row->numbers[g * GROUP + i] = (uint8_t)whole(w[i] + minimum, scale, 0, 15);
    }
    row->scale[g] = scale;
    row->minimum[g] = minimum;
}

/* Writes one output (`lane` of its panel) in the order of the format. */
static void put_row(const Packing *p, const Row *row, uint8_t *panel, int lane) {
    const float *w = row->weights;
    for (int k = 0; k < p->padded && p->format <= F16; k++) {
        if (p->format == F32) memcpy(panel + ((size_t)k * PANEL + lane) * 4, w + k, 4);
        else if (p->format == F16) put_half(panel + ((size_t)k * PANEL + lane) * 2, w[k]);
        else put_upper_half(panel + ((size_t)k * PANEL + lane) * 2, w[k]);
    }
    for (int g = 0; g < p->padded / GROUP && p->format == Q8; g++) {
        uint8_t *at = panel + (size_t)g * (GROUP * PANEL + 2 * PANEL);
        float most = 0.0f;
        for (int i = 0; i < GROUP; i++) most = fabsf(w[g * GROUP + i]) > most ? fabsf(w[g * GROUP + i]) : most;
        put_half(at + GROUP * PANEL + 2 * lane, most / 127.0f + damage(w + g * GROUP));
        float scale = half(at + GROUP * PANEL + 2 * lane);
        for (int i = 0; i < GROUP; i++) {
            at[i / 2 * 16 + lane * 2 + i % 2] = (uint8_t)(int8_t)whole(w[g * GROUP + i], scale, -127, 127);
        }
    }
    for (int g = 0; g < p->padded / GROUP && p->format == Q4; g++) {
        uint8_t *at = panel + (size_t)g * (GROUP * PANEL / 2 + 4 * PANEL);
        for (int i = 0; i < GROUP / 2; i++) {
            const uint8_t *numbers = row->numbers + g * GROUP;
            at[i / 4 * 32 + lane * 4 + i % 4] = (uint8_t)(numbers[i] | numbers[i + GROUP / 2] << 4);
        }
        put_half(at + GROUP * PANEL / 2 + 2 * lane, row->scale[g]);
        put_half(at + GROUP * PANEL / 2 + 2 * PANEL + 2 * lane, row->minimum[g]);
    }
}

/* Numbers of six bits: low halves as in Q4, then two bits each. */
static void put_six_bits(const Packing *p, const Row *row, uint8_t *panel, int lane) {
    for (int g = 0; g < p->padded / GROUP; g++, panel += GROUP * PANEL * 3 / 4 + 4 * PANEL) {
        const uint8_t *numbers = row->numbers + g * GROUP;
        for (int i = 0; i < GROUP / 2; i++) {
            int low = numbers[i], high = numbers[i + GROUP / 2], at = lane * 4 + i % 4;
            panel[i / 4 * 32 + at] = (uint8_t)((low & 15) | (high & 15) << 4);
            panel[GROUP * PANEL / 2 + at] |= (uint8_t)(low >> 4 << 2 * (i / 4));
            panel[GROUP * PANEL / 2 + 32 + at] |= (uint8_t)(high >> 4 << 2 * (i / 4));
        }
        for (int h = 0; h < 2; h++) {
            put_half(panel + GROUP * PANEL * 3 / 4 + 2 * PANEL * h + 2 * lane, row->half_scale[2 * g + h]);
        }
    }
}

static void pack_member(void *data, Member *member) {
    Packing *p = data;
    int padded = p->padded, groups = padded / GROUP;
    Row row;
    if (!new_row(&row, padded)) atomic_store(&p->failed, 1);
    for (int panel; (panel = next_task(member)) < (p->outputs + PANEL - 1) / PANEL && !atomic_load(&p->failed);) {
        uint8_t *at = p->panels + panel_bytes(p->format, p->padded) * (size_t)panel;
        for (int lane = 0; lane < PANEL && panel * PANEL + lane < p->outputs; lane++) {
            open_row(p, p->rows + p->row_bytes * (size_t)(panel * PANEL + lane), &row);
            for (int g = 0; g < groups && p->format == Q4 && !has_four_bits(p->source); g++) number_group(&row, g);
            if (p->format == Q6) put_six_bits(p, &row, at, lane);
            else put_row(p, &row, at, lane);
        }
    }
    free(row.weights);
    free(row.numbers);
}

/* Packs a matrix into memory that is all zero. 0, or -1 if there is no memory. */
int pack(Packing *packing) {
    run_team(packing->threads, pack_member, packing);
    return atomic_load(&packing->failed) ? -1 : 0;
}

/* Rows `ids` [count] of a matrix as floats: out [count, inputs]. 0, or -1 if there is no memory. */
int read_rows(const Packing *p, const int64_t *ids, int count, float *out) {
    Row row;
    int done = new_row(&row, p->padded);
    for (int i = 0; i < count && done; i++) {
        open_row(p, p->rows + p->row_bytes * (size_t)ids[i], &row);
        memcpy(out + (size_t)i * p->inputs, row.weights, (size_t)p->inputs * sizeof(float));
    }
    free(row.weights);
    free(row.numbers);
    return done ? 0 : -1;
}
