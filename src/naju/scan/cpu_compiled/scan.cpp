// The Naju scan for float32 on a CPU, forward and analytic backward, behind a C ABI.
//
//   x_t = f_t x_{t-1} + v_t B_t^T      f = sigmoid(f_logit), v = sigmoid(i_logit) h
//   y_t = (alpha x_t C_t + D h_t) silu(z_t)
//
// A vector holds neighbouring channels; f and v are vectors, the entries of B and C are scalars, so the sum over the
// state in the readout needs no shuffles. A group of WIDTH vectors is walked SEGMENT tokens at a time; inside a
// segment a tile of TILE state entries stays in registers. The backward first walks forward and keeps the state at
// every segment's start, then walks the segments backward, rebuilding the states of one segment at a time.
//
// The caller pads B, C and the states to a multiple of TILE along the state and gives rows of contiguous channels.

#include "vector.h"
#include "conv.h"
#include "step.h"

// Filled in by Python; the field order is mirrored there.
struct Problem {
    struct Matrix h, f_logit, i_logit, B, C, z, dy;        // inputs; z and dy may be null
    struct Matrix y, dh, df_logit, di_logit, dz, dB, dC;   // outputs; dB and dC have a leading axis of `slots`
    const float *D, *initial_state, *dstate;               // D may be null
    float *state, *dinitial_state, *dD;                    // dD: a row a sequence
    const long *sequences;                                 // (batch index, first token, end token) for each
    parallel_t openmp_parallel;
    long n_sequences, d_inner, d_state, slots, slot_stride, threads, reverse;
    float alpha;
};

struct Span { const struct Problem *p; long batch, first, end, channel, channels; };  // a sequence and a group in it

static inline float *token_at(struct Matrix m, const struct Span *s, long t) {
    long token = s->p->reverse ? s->end - 1 - t : s->first + t;
    return m.data + s->batch * m.batch_stride + token * m.token_stride;
}

// States are (d, n) in memory and (n, channel group) while they are worked on.
static void load_state(row_t *x, const float *from, long channels, long n) {
    for (long k = 0; k < n; k++) {
        float buffer[GROUP] = {0};
        for (long c = 0; c < channels; c++) buffer[c] = from[c * n + k];
        for (int w = 0; w < WIDTH; w++) x[k][w] = *(const loose *)(buffer + w * LANES);
    }
}

static void store_state(float *to, row_t *x, long channels, long n) {
    for (long k = 0; k < n; k++)
        for (long c = 0; c < channels; c++) to[c * n + k] = x[k][c / LANES][c % LANES];
}

// ---- forward --------------------------------------------------------------------------------------------------

static void load_drive(const struct Span *s, long start, long count, row_t *f, row_t *v) {
    for (long t = 0; t < count; t++) {
        row_t h, fl, il;
        load_row(h, token_at(s->p->h, s, start + t) + s->channel, s->channels);
        load_row(fl, token_at(s->p->f_logit, s, start + t) + s->channel, s->channels);
        load_row(il, token_at(s->p->i_logit, s, start + t) + s->channel, s->channels);
        for (int w = 0; w < WIDTH; w++) {
            f[t][w] = gate(fl[w]).on;
            v[t][w] = gate(il[w]).on * h[w];
        }
    }
}

// Advance the whole state over `count` tokens; with `m`, also read it out after each.
template <bool READ>
static void advance(const struct Span *s, long start, long count, const row_t *f, const row_t *v, row_t *x, row_t *m) {
    long n = s->p->d_state;
    if (READ) memset(m, 0, count * sizeof(row_t));
    for (long k = 0; k < n; k += TILE) {
        row_t tile[TILE];
        memcpy(tile, x + k, sizeof tile);
        for (long t = 0; t < count; t++) {
            const float *B = token_at(s->p->B, s, start + t) + k, *C = token_at(s->p->C, s, start + t) + k;
            for (int w = 0; w < WIDTH; w++) {
                vec ft = f[t][w], vt = v[t][w], sum = READ ? m[t][w] : (vec){};
                for (int j = 0; j < TILE; j++) {
                    tile[j][w] = ft * tile[j][w] + vt * B[j];
                    if (READ) sum += tile[j][w] * C[j];
                }
                if (READ) m[t][w] = sum;
            }
        }
        memcpy(x + k, tile, sizeof tile);
    }
}

static void write_outputs(const struct Span *s, long start, long count, const row_t *m, const row_t D) {
    const struct Problem *p = s->p;
    for (long t = 0; t < count; t++) {
        row_t h, y, z = {};
        load_row(h, token_at(p->h, s, start + t) + s->channel, s->channels);
        if (p->z.data) load_row(z, token_at(p->z, s, start + t) + s->channel, s->channels);
        for (int w = 0; w < WIDTH; w++) {
            y[w] = m[t][w] * p->alpha + D[w] * h[w];
            if (p->z.data) y[w] *= z[w] * gate(z[w]).on;
        }
        store_row(token_at(p->y, s, start + t) + s->channel, y, s->channels);
    }
}

static int forward_group(const struct Span *s, long sequence) {
    const struct Problem *p = s->p;
    long n = p->d_state, length = s->end - s->first;
    row_t *x = (row_t *)aligned((n + 3 * SEGMENT) * sizeof(row_t));
    if (!x) return 1;
    row_t *f = x + n, *v = f + SEGMENT, *m = v + SEGMENT, D = {};
    long place = (sequence * p->d_inner + s->channel) * n;
    load_state(x, p->initial_state + place, s->channels, n);
    if (p->D) load_row(D, p->D + s->channel, s->channels);
    for (long start = 0; start < length; start += SEGMENT) {
        long count = at_most(SEGMENT, length - start);
        load_drive(s, start, count, f, v);
        advance<true>(s, start, count, f, v, x, m);
        write_outputs(s, start, count, m, D);
    }
    store_state(p->state + place, x, s->channels, n);
    free(x);
    return 0;
}

// ---- backward -------------------------------------------------------------------------------------------------

// Working memory of one segment of one group. `past[t]` is the state before token t; the last is that after it.
struct Work {
    row_t f[SEGMENT], off_f[SEGMENT], v[SEGMENT], i[SEGMENT], off_i[SEGMENT], h[SEGMENT];
    row_t dm[SEGMENT], dp[SEGMENT], m[SEGMENT], dv[SEGMENT], df[SEGMENT];
    row_t past[SEGMENT + 1][TILE];
};

static void load_segment(const struct Span *s, long start, long count, struct Work *k) {
    const struct Problem *p = s->p;
    for (long t = 0; t < count; t++) {
        row_t fl, il, z = {};
        load_row(k->h[t], token_at(p->h, s, start + t) + s->channel, s->channels);
        load_row(fl, token_at(p->f_logit, s, start + t) + s->channel, s->channels);
        load_row(il, token_at(p->i_logit, s, start + t) + s->channel, s->channels);
        load_row(k->dp[t], token_at(p->dy, s, start + t) + s->channel, s->channels);
        if (p->z.data) load_row(z, token_at(p->z, s, start + t) + s->channel, s->channels);
        for (int w = 0; w < WIDTH; w++) {
            struct Gate forget = gate(fl[w]), write = gate(il[w]);
            k->f[t][w] = forget.on, k->off_f[t][w] = forget.off;
            k->i[t][w] = write.on, k->off_i[t][w] = write.off;
            k->v[t][w] = write.on * k->h[t][w];
            if (p->z.data) k->dp[t][w] *= z[w] * gate(z[w]).on;
            k->dm[t][w] = k->dp[t][w] * p->alpha;
        }
    }
    memset(k->m, 0, sizeof k->m);
    memset(k->dv, 0, sizeof k->dv);
    memset(k->df, 0, sizeof k->df);
}

// Rebuild one tile of the states of a segment from the state `x` at its start.
static void rebuild(const struct Span *s, long start, long count, long tile, const row_t *x, struct Work *k) {
    row_t now[TILE];
    memcpy(now, x + tile, sizeof now);
    for (long t = 0; t < count; t++) {
        const float *B = token_at(s->p->B, s, start + t) + tile, *C = token_at(s->p->C, s, start + t) + tile;
        memcpy(k->past[t], now, sizeof now);
        for (int w = 0; w < WIDTH; w++) {
            vec f = k->f[t][w], v = k->v[t][w], m = k->m[t][w];
            for (int j = 0; j < TILE; j++) {
                now[j][w] = f * now[j][w] + v * B[j];
                m += now[j][w] * C[j];
            }
            k->m[t][w] = m;
        }
    }
    memcpy(k->past[count], now, sizeof now);
}

// Walk one tile of the adjoint state X backward through a segment: X_t = dm_t C_t^T + f_{t+1} X_{t+1}.
// dB and dC collect vectors of channels; their lanes are summed when the segment is done.
static void walk_back(const struct Span *s, long start, long count, long tile, row_t *X, struct Work *k, vec *dB, vec *dC) {
    long n = s->p->d_state;
    row_t adjoint[TILE];
    memcpy(adjoint, X + tile, sizeof adjoint);
    for (long t = count - 1; t >= 0; t--) {
        const float *B = token_at(s->p->B, s, start + t) + tile, *C = token_at(s->p->C, s, start + t) + tile;
        vec *dBt = dB + t * n + tile, *dCt = dC + t * n + tile;
        vec dv[WIDTH], df[WIDTH];
        memcpy(dv, k->dv[t], sizeof dv);
        memcpy(df, k->df[t], sizeof df);
        for (int j = 0; j < TILE; j++) {
            vec dBj = dBt[j], dCj = dCt[j];
            for (int w = 0; w < WIDTH; w++) {
                vec a = adjoint[j][w] + k->dm[t][w] * C[j];
                dv[w] += a * B[j];
                df[w] += a * k->past[t][j][w];
                dBj += a * k->v[t][w];
                dCj += k->past[t + 1][j][w] * k->dm[t][w];
                adjoint[j][w] = a * k->f[t][w];
            }
            dBt[j] = dBj, dCt[j] = dCj;
        }
        memcpy(k->dv[t], dv, sizeof dv);
        memcpy(k->df[t], df, sizeof df);
    }
    memcpy(X + tile, adjoint, sizeof adjoint);
}

static void write_gradients(const struct Span *s, long start, long count, struct Work *k, const row_t D, row_t dD) {
    const struct Problem *p = s->p;
    row_t segment_dD = {};  // summed by segments: one running sum over a long sequence would lose digits
    for (long t = 0; t < count; t++) {
        row_t dh, df, di, dz = {}, z = {}, dy = {};
        if (p->z.data) {
            load_row(z, token_at(p->z, s, start + t) + s->channel, s->channels);
            load_row(dy, token_at(p->dy, s, start + t) + s->channel, s->channels);
        }
        for (int w = 0; w < WIDTH; w++) {
            vec h = k->h[t][w];
            dh[w] = k->dv[t][w] * k->i[t][w] + D[w] * k->dp[t][w];
            df[w] = k->df[t][w] * (k->f[t][w] * k->off_f[t][w]);
            di[w] = k->dv[t][w] * h * (k->i[t][w] * k->off_i[t][w]);
            segment_dD[w] += k->dp[t][w] * h;
            if (p->z.data) {
                struct Gate g = gate(z[w]);
                vec before = k->m[t][w] * p->alpha + D[w] * h;
                dz[w] = dy[w] * before * g.on * (splat(1.0f) + z[w] * g.off);
            }
        }
        store_row(token_at(p->dh, s, start + t) + s->channel, dh, s->channels);
        store_row(token_at(p->df_logit, s, start + t) + s->channel, df, s->channels);
        store_row(token_at(p->di_logit, s, start + t) + s->channel, di, s->channels);
        if (p->z.data) store_row(token_at(p->dz, s, start + t) + s->channel, dz, s->channels);
    }
    for (int w = 0; w < WIDTH; w++) dD[w] += segment_dD[w];
}

// One sequence and a run of channel groups. Segments are the outer loop so that dB and dC of a segment are collected
// over all these groups before their lanes are summed; each group's adjoint state waits in `X` between segments.
static int backward_groups(const struct Problem *p, long sequence, long slot, long first_group, long end_group) {
    const long *where = p->sequences + 3 * sequence;
    long n = p->d_state, length = where[2] - where[1], groups = end_group - first_group;
    long segments = (length + SEGMENT - 1) / SEGMENT;
    row_t *kept = (row_t *)aligned(groups * segments * n * sizeof(row_t));
    row_t *X = (row_t *)aligned(groups * (n + 2) * sizeof(row_t));
    row_t *D = X + groups * n, *dD = D + groups;
    vec *dB = (vec *)aligned(2 * SEGMENT * n * sizeof(vec)), *dC = dB + SEGMENT * n;
    row_t *x = (row_t *)aligned(n * sizeof(row_t));
    struct Work *work = (struct Work *)aligned(sizeof(struct Work));
    int failed = !kept || !X || !dB || !x || !work;
    for (long g = 0; g < groups && !failed; g++) {
        long channel = (first_group + g) * GROUP;
        struct Span s = {p, where[0], where[1], where[2], channel, at_most(GROUP, p->d_inner - channel)};
        long place = (sequence * p->d_inner + channel) * n;
        memset(D[g], 0, sizeof(row_t));
        memset(dD[g], 0, sizeof(row_t));
        if (p->D) load_row(D[g], p->D + channel, s.channels);
        load_state(X + g * n, p->dstate + place, s.channels, n);
        load_state(x, p->initial_state + place, s.channels, n);
        for (long segment = 0; segment < segments; segment++) {
            long start = segment * SEGMENT, count = at_most(SEGMENT, length - start);
            memcpy(kept + (g * segments + segment) * n, x, n * sizeof(row_t));
            if (segment == segments - 1) break;
            load_drive(&s, start, count, work->f, work->v);
            advance<false>(&s, start, count, work->f, work->v, x, NULL);
        }
    }
    for (long segment = segments - 1; segment >= 0 && !failed; segment--) {
        long start = segment * SEGMENT, count = at_most(SEGMENT, length - start);
        memset(dB, 0, 2 * SEGMENT * n * sizeof(vec));
        for (long g = 0; g < groups; g++) {
            long channel = (first_group + g) * GROUP;
            struct Span s = {p, where[0], where[1], where[2], channel, at_most(GROUP, p->d_inner - channel)};
            load_segment(&s, start, count, work);
            for (long tile = 0; tile < n; tile += TILE) {
                rebuild(&s, start, count, tile, kept + (g * segments + segment) * n, work);
                walk_back(&s, start, count, tile, X + g * n, work, dB, dC);
            }
            write_gradients(&s, start, count, work, D[g], dD[g]);
        }
        struct Span s = {p, where[0], where[1], where[2], 0, 0};
        for (long t = 0; t < count; t++) {
            float *dB_out = token_at(p->dB, &s, start + t) + slot * p->slot_stride;
            float *dC_out = token_at(p->dC, &s, start + t) + slot * p->slot_stride;
            for (long k = 0; k < n; k++) {
                dB_out[k] = lane_sum(dB[t * n + k]);
                dC_out[k] = lane_sum(dC[t * n + k]);
            }
        }
    }
    for (long g = 0; g < groups && !failed; g++) {
        long channel = (first_group + g) * GROUP, channels = at_most(GROUP, p->d_inner - channel);
        store_state(p->dinitial_state + (sequence * p->d_inner + channel) * n, X + g * n, channels, n);
        store_row(p->dD + sequence * p->d_inner + channel, dD[g], channels);
    }
    free(kept), free(X), free(dB), free(x), free(work);
    return failed;
}

// ---- entry points ---------------------------------------------------------------------------------------------

static long groups_of(const struct Problem *p) { return (p->d_inner + GROUP - 1) / GROUP; }

static int forward_piece(const void *problem, long piece) {
    const struct Problem *p = (const struct Problem *)problem;
    long sequence = piece / groups_of(p), channel = piece % groups_of(p) * GROUP;
    const long *where = p->sequences + 3 * sequence;
    struct Span s = {p, where[0], where[1], where[2], channel, at_most(GROUP, p->d_inner - channel)};
    return forward_group(&s, sequence);
}

static int backward_piece(const void *problem, long piece) {
    const struct Problem *p = (const struct Problem *)problem;
    long sequence = piece / p->slots, slot = piece % p->slots, groups = groups_of(p);
    return backward_groups(p, sequence, slot, slot * groups / p->slots, (slot + 1) * groups / p->slots);
}

extern "C" {

long naju_group(void) { return GROUP; }
long naju_tile(void) { return TILE; }

// Both return 0, or 1 when memory ran out.
int naju_forward(const struct Problem *p) {
    return run(forward_piece, p, p->n_sequences * groups_of(p), p->threads, p->openmp_parallel);
}

int naju_backward(const struct Problem *p) {
    return run(backward_piece, p, p->n_sequences * p->slots, p->threads, p->openmp_parallel);
}

}
