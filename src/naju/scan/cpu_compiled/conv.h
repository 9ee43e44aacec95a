// Short depthwise causal convolutions of one input, up to MOST_OUTPUTS of them at once:
//
//   out_g[t] = act(bias_g + add_g[t] + sum_j weight_g[j] u[t - (width - 1) + j])       act: identity or SiLU
//
// Tokens before a sequence's start come from its tail. Weights are (output, width, channel).
#pragma once

#include "vector.h"

enum { MOST_OUTPUTS = 2 };

// Filled in by Python; the field order is mirrored there.
struct ConvProblem {
    struct Matrix u, add[MOST_OUTPUTS], out[MOST_OUTPUTS], dout[MOST_OUTPUTS], du;  // add may be null
    const float *tail, *weight, *bias;     // tail: (sequence, width - 1, channel); bias: (output, channel)
    float *dtail, *dweight, *dbias;        // dweight and dbias have a leading axis of sequences
    const long *sequences;                 // (batch index, first token, end token) for each
    parallel_t openmp_parallel;
    long n_sequences, channels, width, outputs, silu, threads;
};

// One sequence and one channel group of it.
struct Strip { const struct ConvProblem *p; long sequence, batch, first, length, channel, channels; };

static inline float *strip_row(struct Matrix m, const struct Strip *s, long t) {
    return m.data + s->batch * m.batch_stride + (s->first + t) * m.token_stride + s->channel;
}

static inline long tail_place(const struct Strip *s, long t) {
    long kept = s->p->width - 1;
    return (s->sequence * kept + kept + t) * s->p->channels + s->channel;
}

static inline const float *input_row(const struct Strip *s, long t) {
    return t < 0 ? s->p->tail + tail_place(s, t) : strip_row(s->p->u, s, t);
}

static inline void weight_row(row_t out, const struct Strip *s, long output, long j) {
    load_row(out, s->p->weight + (output * s->p->width + j) * s->p->channels + s->channel, s->channels);
}

// Before the activation.
static inline void convolve(const struct Strip *s, long output, long t, const row_t bias, row_t *weights, row_t out) {
    const struct ConvProblem *p = s->p;
    memcpy(out, bias, sizeof(row_t));
    if (p->add[output].data) {
        row_t add;
        load_row(add, strip_row(p->add[output], s, t), s->channels);
        for (int w = 0; w < WIDTH; w++) out[w] += add[w];
    }
    for (long j = 0; j < p->width; j++) {
        row_t u;
        load_row(u, input_row(s, t - (p->width - 1) + j), s->channels);
        for (int w = 0; w < WIDTH; w++) out[w] += weights[j][w] * u[w];
    }
}

static int conv_forward_strip(const struct Strip *s) {
    const struct ConvProblem *p = s->p;
    row_t *weights = (row_t *)aligned(p->width * sizeof(row_t));
    if (!weights) return 1;
    for (long g = 0; g < p->outputs; g++) {
        row_t bias;
        load_row(bias, p->bias + g * p->channels + s->channel, s->channels);
        for (long j = 0; j < p->width; j++) weight_row(weights[j], s, g, j);
        for (long t = 0; t < s->length; t++) {
            row_t out;
            convolve(s, g, t, bias, weights, out);
            for (int w = 0; w < WIDTH && p->silu; w++) out[w] *= gate(out[w]).on;
            store_row(strip_row(p->out[g], s, t), out, s->channels);
        }
    }
    free(weights);
    return 0;
}

// The gradient before the activation, one output, some tokens; adds dweight, a row for each tap, and dbias to `sums`.
static void conv_backward_tokens(
    const struct Strip *s, long g, long start, long end, const row_t bias, row_t *weights, row_t *sums, row_t *dpre) {
    const struct ConvProblem *p = s->p;
    for (long t = start; t < end; t++) {
        load_row(dpre[t], strip_row(p->dout[g], s, t), s->channels);
        if (p->silu) {
            row_t pre;
            convolve(s, g, t, bias, weights, pre);
            for (int w = 0; w < WIDTH; w++) {
                struct Gate sigmoid = gate(pre[w]);
                dpre[t][w] *= sigmoid.on * (splat(1.0f) + pre[w] * sigmoid.off);
            }
        }
        for (long j = 0; j < p->width; j++) {
            row_t u;
            load_row(u, input_row(s, t - (p->width - 1) + j), s->channels);
            for (int w = 0; w < WIDTH; w++) sums[j][w] += dpre[t][w] * u[w];
        }
        for (int w = 0; w < WIDTH; w++) sums[p->width][w] += dpre[t][w];
    }
}

// The same for all tokens, summed by segments: one running sum over a long sequence would lose digits.
static void conv_backward_output(
    const struct Strip *s, long g, row_t *weights, row_t *sums, row_t *segment, row_t *dpre) {
    long rows = s->p->width + 1;
    row_t bias;
    load_row(bias, s->p->bias + g * s->p->channels + s->channel, s->channels);
    for (long start = 0; start < s->length; start += SEGMENT) {
        memset(segment, 0, rows * sizeof(row_t));
        conv_backward_tokens(s, g, start, at_most(start + SEGMENT, s->length), bias, weights, segment, dpre);
        for (long k = 0; k < rows; k++)
            for (int w = 0; w < WIDTH; w++) sums[k][w] += segment[k][w];
    }
}

static void conv_backward_input(const struct Strip *s, row_t *weights, row_t *dpre) {
    const struct ConvProblem *p = s->p;
    long kept = p->width - 1;
    for (long t = -kept; t < s->length; t++) {
        row_t du = {};
        for (long j = 0; j <= kept; j++) {
            long reader = t + kept - j;  // the token whose tap j reads this one
            if (reader < 0 || reader >= s->length) continue;
            for (long g = 0; g < p->outputs; g++)
                for (int w = 0; w < WIDTH; w++) du[w] += weights[g * p->width + j][w] * dpre[g * s->length + reader][w];
        }
        store_row(t < 0 ? p->dtail + tail_place(s, t) : strip_row(p->du, s, t), du, s->channels);
    }
}

static int conv_backward_strip(const struct Strip *s) {
    const struct ConvProblem *p = s->p;
    long taps = p->outputs * p->width, rows = p->width + 1;
    row_t *weights = (row_t *)aligned((taps + (p->outputs + 1) * rows) * sizeof(row_t));
    row_t *dpre = (row_t *)aligned(p->outputs * s->length * sizeof(row_t));
    int failed = !weights || !dpre;
    if (!failed) {
        row_t *sums = weights + taps, *segment = sums + p->outputs * rows;
        memset(sums, 0, p->outputs * rows * sizeof(row_t));
        for (long g = 0; g < p->outputs; g++) {
            row_t *own = weights + g * p->width;
            for (long j = 0; j < p->width; j++) weight_row(own[j], s, g, j);
            conv_backward_output(s, g, own, sums + g * rows, segment, dpre + g * s->length);
        }
        conv_backward_input(s, weights, dpre);
        for (long g = 0; g < p->outputs; g++) {
            long output = s->sequence * p->outputs + g;
            row_t *own = sums + g * rows;
            for (long j = 0; j < p->width; j++)
                store_row(p->dweight + (output * p->width + j) * p->channels + s->channel, own[j], s->channels);
            store_row(p->dbias + output * p->channels + s->channel, own[p->width], s->channels);
        }
    }
    free(weights), free(dpre);
    return failed;
}

static struct Strip strip_of(const struct ConvProblem *p, long piece) {
    long groups = (p->channels + GROUP - 1) / GROUP, sequence = piece / groups, channel = piece % groups * GROUP;
    const long *where = p->sequences + 3 * sequence;
    struct Strip s = {p, sequence, where[0], where[1], where[2] - where[1], channel, at_most(GROUP, p->channels - channel)};
    return s;
}

static int conv_forward_piece(const void *problem, long piece) {
    struct Strip s = strip_of((const struct ConvProblem *)problem, piece);
    return conv_forward_strip(&s);
}

static int conv_backward_piece(const void *problem, long piece) {
    struct Strip s = strip_of((const struct ConvProblem *)problem, piece);
    return conv_backward_strip(&s);
}

static int conv_run(int (*work)(const void *, long), const struct ConvProblem *p) {
    return run(work, p, p->n_sequences * ((p->channels + GROUP - 1) / GROUP), p->threads, p->openmp_parallel);
}

extern "C" {

// Both return 0, or 1 when memory ran out.
int naju_conv_forward(const struct ConvProblem *p) { return conv_run(conv_forward_piece, p); }
int naju_conv_backward(const struct ConvProblem *p) { return conv_run(conv_backward_piece, p); }

}
