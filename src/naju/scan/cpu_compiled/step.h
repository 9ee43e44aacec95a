// One decoding step of a Naju layer between its outer projections, for float32 on a CPU:
//
//   h = silu(conv(u_tail, u))      logit_g = (W_g h + conv_g(h_tail, h) + bias_g) / gate_scale      B, C = W_BC h
//   x' = f x + i h B^T             y = (alpha x' C + D h) silu(z)
//
// Three walks with a barrier between them: sequences for h, rows of the weights for the products, channels for the
// state. With one gate instead of two, f_logit = -i_logit.
#pragma once

#include "vector.h"

enum { ROWS = 4, SEQUENCES = 4, WEIGHT_PIECE = 32, CHANNEL_PIECE = 64, WORTH_THREADS = 1 << 19 };

// Filled in by Python; the field order is mirrored there.
struct StepProblem {
    const float *uz, *x, *u_tail, *h_tail;                          // (b, 2d), (b, d, n), (b, width - 1, d) twice
    const float *conv_taps, *conv_bias;                             // (d, width), (d)
    const float *W_f, *f_taps, *f_bias, *W_i, *i_taps, *i_bias;     // (d, d), (d, width), (d); W_f null: one gate
    const float *W_BC, *D;                                          // (2n, d), (d)
    float *h, *products;                                            // working space: (b, d), (b, rows of all W)
    float *y, *next_x, *next_u_tail, *next_h_tail;                  // outputs
    parallel_t openmp_parallel;
    long batch, d_inner, d_state, width, threads;
    float alpha, gate_scale;
};

static inline long product_rows(const struct StepProblem *p) {
    return (p->W_f ? 2 : 1) * p->d_inner + 2 * p->d_state;
}

static inline vec load_some(const float *from, long count) {
    if (count >= LANES) return *(const loose *)from;
    vec result = {};
    memcpy(&result, from, count * sizeof(float));
    return result;
}

static inline void store_some(float *to, vec values, long count) { memcpy(to, &values, at_most(count, LANES) * sizeof(float)); }

// In pairs: a running sum would wait for each addition.
static inline float sum_of(vec x) {
    float lanes[LANES];
    memcpy(lanes, &x, sizeof lanes);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

// bias + sum_j taps[j] past[j] of one channel; the last of the past is `now`, the others lie `stride` apart.
static inline float tapped(const float *taps, const float *past, long stride, long width, float now, float bias) {
    for (long j = 0; j < width - 1; j++) bias += taps[j] * past[j * stride];
    return bias + taps[width - 1] * now;
}

static void shift_tail(float *to, const float *tail, const float *newest, long kept, long channels) {
    if (kept == 0) return;
    memcpy(to, tail + channels, (kept - 1) * channels * sizeof(float));
    memcpy(to + (kept - 1) * channels, newest, channels * sizeof(float));
}

static int step_drive(const void *problem, long sequence) {
    const struct StepProblem *p = (const struct StepProblem *)problem;
    long d = p->d_inner, kept = p->width - 1, tail = sequence * kept * d;
    const float *u = p->uz + sequence * 2 * d;
    float *h = p->h + sequence * d;
    for (long c = 0; c < d; c += LANES) {
        vec sum = {};
        for (long k = 0; k < at_most(LANES, d - c); k++)
            sum[k] = tapped(p->conv_taps + (c + k) * p->width, p->u_tail + tail + c + k, d, p->width, u[c + k], p->conv_bias[c + k]);
        store_some(h + c, sum * gate(sum).on, d - c);
    }
    shift_tail(p->next_u_tail + tail, p->u_tail + tail, u, kept, d);
    shift_tail(p->next_h_tail + tail, p->h_tail + tail, h, kept, d);
    return 0;
}

// out[s][r] = W[r] · h[s]: each load of a weight serves several sequences, and each of h several rows.
template <int R, int S>
static void dots(const float *W, const float *h, long d, float *out, long out_stride) {
    vec sums[R][S] = {};
    for (long c = 0; c < d; c += LANES) {
        vec now[S];
        for (int s = 0; s < S; s++) now[s] = load_some(h + s * d + c, d - c);
        for (int r = 0; r < R; r++) {
            vec weight = load_some(W + r * d + c, d - c);
            for (int s = 0; s < S; s++) sums[r][s] += weight * now[s];
        }
    }
    for (int r = 0; r < R; r++)
        for (int s = 0; s < S; s++) out[s * out_stride + r] = sum_of(sums[r][s]);
}

template <int R>
static void row_products(const struct StepProblem *p, const float *W, long column) {
    long d = p->d_inner, stride = product_rows(p), sequence = 0;
    for (; sequence + SEQUENCES <= p->batch; sequence += SEQUENCES)
        dots<R, SEQUENCES>(W, p->h + sequence * d, d, p->products + sequence * stride + column, stride);
    for (; sequence < p->batch; sequence++)
        dots<R, 1>(W, p->h + sequence * d, d, p->products + sequence * stride + column, stride);
}

// A row of the weights W_i, W_f and W_BC on top of each other.
static inline const float *weight_at(const struct StepProblem *p, long row) {
    long d = p->d_inner;
    if (row < d) return p->W_i + row * d;
    if (p->W_f && row < 2 * d) return p->W_f + (row - d) * d;
    return p->W_BC + (row - (p->W_f ? 2 : 1) * d) * d;
}

static int step_products(const void *problem, long piece) {
    const struct StepProblem *p = (const struct StepProblem *)problem;
    long end = at_most((piece + 1) * WEIGHT_PIECE, product_rows(p));
    for (long row = piece * WEIGHT_PIECE; row < end;) {
        const float *W = weight_at(p, row);
        if (row + ROWS <= end && weight_at(p, row + ROWS - 1) == W + (ROWS - 1) * p->d_inner) {
            row_products<ROWS>(p, W, row);
            row += ROWS;
        } else {
            row_products<1>(p, W, row);
            row++;
        }
    }
    return 0;
}

// Where f is 1/2 or more as x + (v B - (1 - f) x), which drifts less over very many tokens than f x + v B.
static float step_state(const float *x, float *next, const float *B, const float *C, long n, float on, float off, float v) {
    vec read = {};
    bool keeps = on >= 0.5f;
    for (long k = 0; k < n; k += LANES) {
        vec old = load_some(x + k, n - k), write = load_some(B + k, n - k) * v;
        vec now = keeps ? old + (write - old * off) : write + old * on;
        store_some(next + k, now, n - k);
        read += now * load_some(C + k, n - k);
    }
    return sum_of(read);
}

static inline vec logits_at(const struct StepProblem *p, const float *taps, const float *bias, const float *products, long sequence, long channel) {
    long d = p->d_inner, kept = p->width - 1;
    vec result = {};
    for (long k = 0, c = channel; k < LANES && c < d; k++, c++)
        result[k] = products[c] + tapped(taps + c * p->width, p->h_tail + sequence * kept * d + c, d, p->width, p->h[sequence * d + c], bias[c]);
    return result / p->gate_scale;
}

static int step_channels(const void *problem, long piece) {
    const struct StepProblem *p = (const struct StepProblem *)problem;
    long d = p->d_inner, n = p->d_state, pieces = (d + CHANNEL_PIECE - 1) / CHANNEL_PIECE;
    long sequence = piece / pieces, first = piece % pieces * CHANNEL_PIECE, end = at_most(first + CHANNEL_PIECE, d);
    const float *products = p->products + sequence * product_rows(p), *B = products + product_rows(p) - 2 * n;
    for (long channel = first; channel < end; channel += LANES) {
        vec i_logit = logits_at(p, p->i_taps, p->i_bias, products, sequence, channel);
        vec f_logit = p->W_f ? logits_at(p, p->f_taps, p->f_bias, products + d, sequence, channel) : -i_logit;
        struct Gate forget = gate(f_logit), write = gate(i_logit);
        vec h = load_some(p->h + sequence * d + channel, d - channel), v = write.on * h, read = {};
        for (long k = 0, c = channel; k < LANES && c < d; k++, c++) {
            long place = (sequence * d + c) * n;
            read[k] = step_state(p->x + place, p->next_x + place, B, B + n, n, forget.on[k], forget.off[k], v[k]);
        }
        vec z = load_some(p->uz + (2 * sequence + 1) * d + channel, d - channel);
        vec y = read * p->alpha + load_some(p->D + channel, d - channel) * h;
        store_some(p->y + sequence * d + channel, y * z * gate(z).on, d - channel);
    }
    return 0;
}

extern "C" {

// Returns 0: it needs no memory of its own.
int naju_step(const struct StepProblem *p) {
    long work = p->batch * p->d_inner * (product_rows(p) + p->d_state);
    long threads = work < WORTH_THREADS ? 1 : p->threads;
    long weight_pieces = (product_rows(p) + WEIGHT_PIECE - 1) / WEIGHT_PIECE;
    long channel_pieces = (p->d_inner + CHANNEL_PIECE - 1) / CHANNEL_PIECE;
    run(step_drive, p, p->batch, threads, p->openmp_parallel);
    run(step_products, p, weight_pieces, threads, p->openmp_parallel);
    run(step_channels, p, p->batch * channel_pieces, threads, p->openmp_parallel);
    return 0;
}

}
