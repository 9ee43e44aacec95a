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

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, TILE = 8 };
#elif defined(__AVX__)
enum { LANES = 8, TILE = 4 };
#else
enum { LANES = 4, TILE = 4 };
#endif
enum { WIDTH = 2, GROUP = LANES * WIDTH, SEGMENT = 32 };

typedef float vec __attribute__((vector_size(LANES * 4), aligned(LANES * 4)));
typedef int ivec __attribute__((vector_size(LANES * 4), aligned(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef vec row_t[WIDTH];  // one token of a channel group

// Filled in by Python; the field order is mirrored there. Strides are in floats.
struct Matrix { float *data; long batch_stride, token_stride; };
struct Problem {
    struct Matrix h, f_logit, i_logit, B, C, z, dy;        // inputs; z and dy may be null
    struct Matrix y, dh, df_logit, di_logit, dz, dB, dC;   // outputs; dB and dC have a leading axis of `slots`
    const float *D, *initial_state, *dstate;               // D may be null
    float *state, *dinitial_state, *dD;                    // dD: a row a sequence
    const long *sequences;                                 // (batch index, first token, end token) for each
    // GOMP_parallel of the OpenMP runtime that torch has already started, or null: its idle workers spin for a while
    // after each torch operation, and threads of our own would have to share the cores with them.
    void (*openmp_parallel)(void (*body)(void *), void *argument, unsigned threads, unsigned flags);
    long n_sequences, d_inner, d_state, slots, slot_stride, threads, reverse;
    float alpha;
};

// ---- vector arithmetic ----------------------------------------------------------------------------------------

static inline vec splat(float value) { return value - (vec){}; }

// exp(x) for x <= 0, to about one unit in the last place; below float32's normal range the result is 0.
static inline vec exp_of_negative(vec x) {
    const vec log2e = splat(1.44269504088896341f), to_integer = splat(12582912.0f);
    vec bounded = x < splat(-87.0f) ? splat(-87.0f) : x;
    vec n = (bounded * log2e + to_integer) - to_integer;
    vec r = (bounded - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
    vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * (r * r) + r + splat(1.0f);
    ivec exponent = (__builtin_convertvector(n, ivec) + 127) << 23;
    vec scale;
    memcpy(&scale, &exponent, sizeof scale);
    return x < splat(-87.0f) ? (vec){} : p * scale;
}

struct Gate { vec on, off; };  // sigmoid(a) and sigmoid(-a): both keep their digits when the other is near 1

static inline struct Gate gate(vec a) {
    vec magnitude = a < (vec){} ? a : -a;
    vec e = exp_of_negative(magnitude);
    vec large = splat(1.0f) / (splat(1.0f) + e), small = e * large;
    struct Gate result = {a < (vec){} ? small : large, a < (vec){} ? large : small};
    return result;
}

static inline float lane_sum(vec x) {
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += x[lane];
    return total;
}

// ---- moving one token of a channel group between memory and vectors -------------------------------------------

struct Span { const struct Problem *p; long batch, first, end, channel, channels; };  // a sequence and a group in it

static inline float *token_at(struct Matrix m, const struct Span *s, long t) {
    long token = s->p->reverse ? s->end - 1 - t : s->first + t;
    return m.data + s->batch * m.batch_stride + token * m.token_stride;
}

static inline void load_row(row_t out, const float *from, long channels) {
    if (channels == GROUP) {
        for (int w = 0; w < WIDTH; w++) out[w] = *(const loose *)(from + w * LANES);
    } else {
        float buffer[GROUP] = {0};
        memcpy(buffer, from, channels * sizeof(float));
        for (int w = 0; w < WIDTH; w++) out[w] = *(const loose *)(buffer + w * LANES);
    }
}

static inline void store_row(float *to, const row_t in, long channels) {
    if (channels == GROUP) {
        for (int w = 0; w < WIDTH; w++) *(loose *)(to + w * LANES) = in[w];
    } else {
        float buffer[GROUP];
        for (int w = 0; w < WIDTH; w++) *(loose *)(buffer + w * LANES) = in[w];
        memcpy(to, buffer, channels * sizeof(float));
    }
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

static void *aligned(size_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, bytes ? bytes : 64) ? NULL : memory;
}

static inline long at_most(long a, long b) { return a < b ? a : b; }

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
            dD[w] += k->dp[t][w] * h;
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

// ---- threads: each takes the next piece of work until none is left --------------------------------------------

struct Crew { const struct Problem *p; int backward; long next, pieces, failed; };

static void work_through(void *argument) {
    struct Crew *crew = (struct Crew *)argument;
    const struct Problem *p = crew->p;
    long groups = (p->d_inner + GROUP - 1) / GROUP;
    for (;;) {
        long piece = __atomic_fetch_add(&crew->next, 1, __ATOMIC_RELAXED);
        if (piece >= crew->pieces) return;
        int failed;
        if (crew->backward) {
            long sequence = piece / p->slots, slot = piece % p->slots;
            failed = backward_groups(p, sequence, slot, slot * groups / p->slots, (slot + 1) * groups / p->slots);
        } else {
            long sequence = piece / groups, channel = piece % groups * GROUP;
            const long *where = p->sequences + 3 * sequence;
            struct Span s = {p, where[0], where[1], where[2], channel, at_most(GROUP, p->d_inner - channel)};
            failed = forward_group(&s, sequence);
        }
        if (failed) __atomic_store_n(&crew->failed, 1, __ATOMIC_RELAXED);
    }
}

static void *thread_main(void *argument) {
    work_through(argument);
    return NULL;
}

static int run(struct Crew crew) {
    long wanted = at_most(at_most(crew.p->threads, crew.pieces), 256);
    if (wanted > 1 && crew.p->openmp_parallel) {
        crew.p->openmp_parallel(work_through, &crew, (unsigned)wanted, 0);
    } else {
        pthread_t threads[256];
        long started = 0;
        while (started < wanted - 1 && !pthread_create(&threads[started], NULL, thread_main, &crew)) started++;
        work_through(&crew);
        for (long k = 0; k < started; k++) pthread_join(threads[k], NULL);
    }
    return (int)crew.failed;
}

extern "C" {

long naju_group(void) { return GROUP; }
long naju_tile(void) { return TILE; }

// Both return 0, or 1 when memory ran out.
int naju_forward(const struct Problem *p) {
    struct Crew crew = {p, 0, 0, p->n_sequences * ((p->d_inner + GROUP - 1) / GROUP), 0};
    return run(crew);
}

int naju_backward(const struct Problem *p) {
    struct Crew crew = {p, 1, 0, p->n_sequences * p->slots, 0};
    return run(crew);
}

}
