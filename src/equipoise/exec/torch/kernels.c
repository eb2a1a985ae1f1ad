/* CPU kernels of a step, float32: paged attention of single query tokens, rotary embedding, page writes,
 * RMS norm, the gated activation and linear layers. Loaded by native.py through ctypes.
 *
 * Pages: (num_pages, num_kv_heads, page_size, head_dim), contiguous. A query token sees the keys
 * [max(0, len - window), len) of its row of the page table. */
#include <math.h>
#include <stdint.h>

#define TILE 128
#define HEADS 8
#define MAX_DIM 256
#define LOWEST (-1e30f) /* stands for minus infinity, which -ffast-math may not see */
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const float *keys, *values;
    int64_t num_kv_heads, group, head_dim, page_size, window;
    float scale, softcap;
    const float *sinks; /* (num_heads) or NULL */
} Layer;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* scores[0, count) = keys . query; keys of positions [at, at + count) of one KV head. */
INLINE void score_tile(const Layer *layer, const int32_t *table, int64_t kv_head, int64_t at, int64_t count,
                       const float *query, float *scores, const int64_t dim) {
    const int64_t size = layer->page_size;
    for (int64_t done = 0; done < count;) {
        const int64_t position = at + done, offset = position % size;
        const int64_t n = least(count - done, size - offset);
        const float *keys =
            layer->keys + (((int64_t)table[position / size] * layer->num_kv_heads + kv_head) * size + offset) * dim;
        for (int64_t j = 0; j < n; j++) {
            float sum = 0;
            for (int64_t d = 0; d < dim; d++) sum += keys[j * dim + d] * query[d];
            scores[done + j] = sum * layer->scale;
        }
        done += n;
    }
}

INLINE void add_values(const Layer *layer, const int32_t *table, int64_t kv_head, int64_t at, int64_t count,
                       const float *weights, float *sum, const int64_t dim) {
    const int64_t size = layer->page_size;
    for (int64_t done = 0; done < count;) {
        const int64_t position = at + done, offset = position % size;
        const int64_t n = least(count - done, size - offset);
        const float *values =
            layer->values + (((int64_t)table[position / size] * layer->num_kv_heads + kv_head) * size + offset) * dim;
        for (int64_t j = 0; j < n; j++)
            for (int64_t d = 0; d < dim; d++) sum[d] += weights[done + j] * values[j * dim + d];
        done += n;
    }
}

/* Turns scores into weights exp(score - best); rescales what was summed under an older, lower best. */
INLINE void soften(const Layer *layer, float *scores, int64_t count, float *best, float *total, float *sum,
                   const int64_t dim) {
    const int64_t padded = (count + 15) / 16 * 16;
    for (int64_t j = count; j < padded; j++) scores[j] = LOWEST;
    if (layer->softcap > 0)
        for (int64_t j = 0; j < count; j++) scores[j] = layer->softcap * tanhf(scores[j] / layer->softcap);
    float highest = LOWEST;
    for (int64_t j = 0; j < padded; j++) highest = scores[j] > highest ? scores[j] : highest;
    if (highest > *best) {
        const float shrink = expf(*best - highest);
        for (int64_t d = 0; d < dim; d++) sum[d] *= shrink;
        *total *= shrink;
        *best = highest;
    }
    float added = 0;
    for (int64_t j = 0; j < padded; j++) {
        scores[j] = expf(scores[j] - *best);
        added += scores[j];
    }
    *total += added;
}

INLINE void finish(const Layer *layer, int64_t head, float best, float total, const float *sum, float *out,
                   const int64_t dim) {
    float shrink = 1;
    if (layer->sinks) {
        const float sink = layer->sinks[head], highest = sink > best ? sink : best;
        shrink = expf(best - highest);
        total = total * shrink + expf(sink - highest);
    }
    shrink /= total;
    for (int64_t d = 0; d < dim; d++) out[d] = sum[d] * shrink;
}

/* The query heads [head, head + num_heads) of one token, all of one KV head; tile by tile, so that a tile
 * of keys and values read for the first head is in cache for the others. */
INLINE void attend_heads(const Layer *layer, const int32_t *table, int64_t len, int64_t kv_head, int64_t head,
                         int64_t num_heads, const float *query, int64_t query_stride, float *out, const int64_t dim) {
    float best[HEADS], total[HEADS], sums[HEADS][MAX_DIM], scores[TILE];
    for (int64_t g = 0; g < num_heads; g++) {
        best[g] = LOWEST;
        total[g] = 0;
        for (int64_t d = 0; d < dim; d++) sums[g][d] = 0;
    }
    const int64_t first = layer->window > 0 && len > layer->window ? len - layer->window : 0;
    for (int64_t at = first; at < len; at += TILE) {
        const int64_t count = least(TILE, len - at);
        for (int64_t g = 0; g < num_heads; g++) {
            score_tile(layer, table, kv_head, at, count, query + g * query_stride, scores, dim);
            soften(layer, scores, count, &best[g], &total[g], sums[g], dim);
            add_values(layer, table, kv_head, at, count, scores, sums[g], dim);
        }
    }
    for (int64_t g = 0; g < num_heads; g++)
        finish(layer, head + g, best[g], total[g], sums[g], out + g * dim, dim);
}

static void attend(const Layer *layer, const int32_t *table, int64_t len, int64_t kv_head, int64_t head,
                   int64_t num_heads, const float *query, int64_t query_stride, float *out) {
    switch (layer->head_dim) { /* a constant dimension keeps the sums in registers */
    case 64: attend_heads(layer, table, len, kv_head, head, num_heads, query, query_stride, out, 64); break;
    case 128: attend_heads(layer, table, len, kv_head, head, num_heads, query, query_stride, out, 128); break;
    default:
        attend_heads(layer, table, len, kv_head, head, num_heads, query, query_stride, out, layer->head_dim);
    }
}

/* Token tokens[i] attends to lens[i] positions of page table row rows[i].
 * query: head h of token t at query + t * token_stride + h * head_stride; out: (num_tokens, num_heads, dim). */
void paged_attention(const Layer *layer, int64_t count, const int32_t *tokens, const int32_t *rows,
                     const int32_t *lens, const int32_t *tables, int64_t table_width, const float *query,
                     int64_t token_stride, int64_t head_stride, float *out, int64_t num_threads) {
    const int64_t group = layer->group, blocks = (group + HEADS - 1) / HEADS;
    const int64_t num_heads = layer->num_kv_heads * group;
    const int64_t num_tasks = count * layer->num_kv_heads * blocks;
#pragma omp parallel for schedule(dynamic, 4) num_threads(num_threads) if (num_tasks > 7)
    for (int64_t task = 0; task < num_tasks; task++) {
        const int64_t i = task / (layer->num_kv_heads * blocks);
        const int64_t kv_head = task / blocks % layer->num_kv_heads, block = task % blocks;
        const int64_t head = kv_head * group + block * HEADS;
        attend(layer, tables + rows[i] * table_width, lens[i], kv_head, head, least(HEADS, group - block * HEADS),
               query + tokens[i] * token_stride + head * head_stride, head_stride,
               out + (tokens[i] * num_heads + head) * layer->head_dim);
    }
}

/* Write keys and values of every token into its page. A head's dim floats are contiguous in both. */
void store_kv(float *key_pages, float *value_pages, int64_t num_tokens, int64_t num_kv_heads, int64_t page_size,
              int64_t dim, const int64_t *page_ids, const int64_t *offsets, const float *keys, const float *values,
              int64_t token_stride, int64_t head_stride) {
    for (int64_t t = 0; t < num_tokens; t++)
        for (int64_t h = 0; h < num_kv_heads; h++) {
            const int64_t to = ((page_ids[t] * num_kv_heads + h) * page_size + offsets[t]) * dim;
            const int64_t from = t * token_stride + h * head_stride;
            for (int64_t d = 0; d < dim; d++) {
                key_pages[to + d] = keys[from + d];
                value_pages[to + d] = values[from + d];
            }
        }
}

/* Rotate, in place, the num_heads heads of each token: the two halves of a head's first rotary_dim floats.
 * norm: (dim) weight of an RMS norm of each head before the rotation, or NULL.
 * tables: (max_len, rotary_dim), cosines in the first half and sines in the second. */
void rotate(float *heads, int64_t num_tokens, int64_t token_stride, int64_t num_heads, int64_t dim,
            const int64_t *positions, const float *tables, int64_t rotary_dim, const float *norm, float eps,
            int64_t num_threads) {
    const int64_t half = rotary_dim / 2;
#pragma omp parallel for num_threads(num_threads) if (num_tokens > 63)
    for (int64_t t = 0; t < num_tokens; t++) {
        const float *cosines = tables + positions[t] * rotary_dim, *sines = cosines + half;
        for (int64_t h = 0; h < num_heads; h++) {
            float *x = heads + t * token_stride + h * dim;
            if (norm) {
                float squares = 0;
                for (int64_t d = 0; d < dim; d++) squares += x[d] * x[d];
                const float factor = 1 / sqrtf(squares / dim + eps);
                for (int64_t d = 0; d < dim; d++) x[d] *= factor * norm[d];
            }
            for (int64_t d = 0; d < half; d++) {
                const float low = x[d], high = x[d + half];
                x[d] = low * cosines[d] - high * sines[d];
                x[d + half] = high * cosines[d] + low * sines[d];
            }
        }
    }
}

/* out[t] = x[t] / rms(x[t]) * weight */
void rms_norm(const float *x, const float *weight, float *out, int64_t num_tokens, int64_t size, float eps,
              int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_tokens * size > 32767)
    for (int64_t t = 0; t < num_tokens; t++) {
        const float *row = x + t * size;
        float squares = 0;
        for (int64_t i = 0; i < size; i++) squares += row[i] * row[i];
        const float factor = 1 / sqrtf(squares / size + eps);
        for (int64_t i = 0; i < size; i++) out[t * size + i] = row[i] * factor * weight[i];
    }
}

/* out[t] = silu(gate[t]) * up[t]; gate and up are the halves of a row of 2 * size floats. */
void silu_mul(const float *gate_up, float *out, int64_t num_tokens, int64_t size, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_tokens * size > 16383)
    for (int64_t t = 0; t < num_tokens; t++) {
        const float *gate = gate_up + 2 * t * size, *up = gate + size;
        for (int64_t i = 0; i < size; i++) {
            const float power = -gate[i] < 80 ? -gate[i] : 80; /* an infinite sum would divide to NaN here */
            out[t * size + i] = gate[i] / (1 + expf(power)) * up[i];
        }
    }
}

/* ---------------------------------------------------------------- linear layers
 *
 * Weights are read along their rows, as checkpoints store them; ROWS rows by up to TOKENS tokens at once, whose
 * sums fill 24 of the 32 registers of AVX-512. A panel of rows that fits the second-level cache is used for all
 * tokens before the next is read, so that weights come from memory once. */

#ifdef __AVX512F__

#define LANES 16
#define ROWS 4
#define TOKENS 6
#define PANEL_BYTES 524288
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float half __attribute__((vector_size(2 * LANES)));
typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));

typedef struct {
    const float *x, *weight, *bias; /* (num_tokens, size), (num_rows, size), (num_rows) or NULL */
    float *out;                     /* (num_tokens, num_rows) */
    int64_t num_tokens, num_rows, size, add; /* add: sum onto what out holds */
} Linear;

/* The sums of four vectors, as four numbers. */
INLINE quad fold(const vec *v) {
    quad parts[4];
    for (int i = 0; i < 4; i++) {
        const half h = __builtin_shufflevector(v[i], v[i], 0, 1, 2, 3, 4, 5, 6, 7) +
                       __builtin_shufflevector(v[i], v[i], 8, 9, 10, 11, 12, 13, 14, 15);
        parts[i] = __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
    }
    const quad low = __builtin_shufflevector(parts[0], parts[1], 0, 4, 1, 5) +
                     __builtin_shufflevector(parts[0], parts[1], 2, 6, 3, 7);
    const quad high = __builtin_shufflevector(parts[2], parts[3], 0, 4, 1, 5) +
                      __builtin_shufflevector(parts[2], parts[3], 2, 6, 3, 7);
    return __builtin_shufflevector(low, high, 0, 1, 4, 5) + __builtin_shufflevector(low, high, 2, 3, 6, 7);
}

/* out[token, row] of a few tokens and rows. */
INLINE void multiply(const Linear *l, int64_t token, int64_t row, const int tokens, const int rows) {
    const float *x = l->x + token * l->size, *weight = l->weight + row * l->size;
    vec sums[TOKENS][ROWS];
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < ROWS; r++) sums[t][r] = (vec){0};
    int64_t at = 0;
    for (; at + LANES <= l->size; at += LANES) {
        vec weights[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) weights[r] = *(const vec *)(weight + r * l->size + at);
#pragma GCC unroll 6
        for (int t = 0; t < tokens; t++) {
            const vec input = *(const vec *)(x + t * l->size + at);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[t][r] += weights[r] * input;
        }
    }
#pragma GCC unroll 6
    for (int t = 0; t < tokens; t++) {
        quad totals = fold(sums[t]);
        for (int64_t i = at; i < l->size; i++)
            for (int r = 0; r < rows; r++) totals[r] += weight[r * l->size + i] * x[t * l->size + i];
        float *out = l->out + (token + t) * l->num_rows + row;
        for (int r = 0; r < rows; r++)
            out[r] = (l->add ? out[r] : 0) + (l->bias ? l->bias[row + r] : 0) + totals[r];
    }
}

INLINE void multiply_tokens(const Linear *l, int64_t token, int64_t row, int64_t tokens, const int rows) {
    switch (tokens) { /* constants: the sums must be registers */
    case 1: multiply(l, token, row, 1, rows); break;
    case 2: multiply(l, token, row, 2, rows); break;
    case 3: multiply(l, token, row, 3, rows); break;
    case 4: multiply(l, token, row, 4, rows); break;
    case 5: multiply(l, token, row, 5, rows); break;
    default: multiply(l, token, row, 6, rows);
    }
}

/* out = x weight^T + bias, or out += that. */
void linear(const float *x, const float *weight, const float *bias, float *out, int64_t num_tokens, int64_t num_rows,
            int64_t size, int64_t add, int64_t num_threads) {
    const Linear l = {x, weight, bias, out, num_tokens, num_rows, size, add};
    const int64_t share = (num_rows + num_threads - 1) / num_threads;
    const int64_t panel = (least(PANEL_BYTES / 4 / size + 1, share) + ROWS - 1) / ROWS * ROWS;
    const int64_t num_panels = (num_rows + panel - 1) / panel, num_blocks = (num_tokens + TOKENS - 1) / TOKENS;
#pragma omp parallel for num_threads(num_threads) if (num_tokens * num_rows * size > 262143)
    for (int64_t p = 0; p < num_panels; p++) {
        const int64_t end = least(num_rows, (p + 1) * panel);
        for (int64_t b = 0; b < num_blocks; b++) {
            const int64_t token = num_tokens * b / num_blocks, tokens = num_tokens * (b + 1) / num_blocks - token;
            int64_t row = p * panel;
            for (; row + ROWS <= end; row += ROWS) multiply_tokens(&l, token, row, tokens, ROWS);
            for (; row < end; row++) multiply_tokens(&l, token, row, tokens, 1);
        }
    }
}

int64_t has_linear(void) { return 1; }

#else /* without AVX-512 the library that torch brings is the better one */

void linear(void) {}
int64_t has_linear(void) { return 0; }

#endif
