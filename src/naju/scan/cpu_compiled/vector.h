// Vectors of neighbouring channels, the sigmoid on them, rows of a channel group in memory, and threads.
#pragma once

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
enum { WIDTH = 2, GROUP = LANES * WIDTH, SEGMENT = 64 };

typedef float vec __attribute__((vector_size(LANES * 4), aligned(LANES * 4)));
typedef int ivec __attribute__((vector_size(LANES * 4), aligned(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef vec row_t[WIDTH];  // one token of a channel group

// A (batch, length, channels) tensor with contiguous channels; strides are in floats.
struct Matrix { float *data; long batch_stride, token_stride; };

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

static void *aligned(size_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, bytes ? bytes : 64) ? NULL : memory;
}

static inline long at_most(long a, long b) { return a < b ? a : b; }

// ---- threads: each takes the next piece of work until none is left --------------------------------------------

// GOMP_parallel of the OpenMP runtime that torch has already started, or null: its idle workers spin for a while after
// each torch operation, and threads of our own would have to share the cores with them.
typedef void (*parallel_t)(void (*body)(void *), void *argument, unsigned threads, unsigned flags);

struct Crew { int (*work)(const void *problem, long piece); const void *problem; long next, pieces, failed; };

static void work_through(void *argument) {
    struct Crew *crew = (struct Crew *)argument;
    for (;;) {
        long piece = __atomic_fetch_add(&crew->next, 1, __ATOMIC_RELAXED);
        if (piece >= crew->pieces) return;
        if (crew->work(crew->problem, piece)) __atomic_store_n(&crew->failed, 1, __ATOMIC_RELAXED);
    }
}

static void *thread_main(void *argument) {
    work_through(argument);
    return NULL;
}

// 0, or 1 if a piece ran out of memory.
static int run(int (*work)(const void *, long), const void *problem, long pieces, long most_threads, parallel_t openmp) {
    struct Crew crew = {work, problem, 0, pieces, 0};
    long wanted = at_most(at_most(most_threads, pieces), 256);
    if (wanted > 1 && openmp) {
        openmp(work_through, &crew, (unsigned)wanted, 0);
    } else {
        pthread_t threads[256];
        long started = 0;
        while (started < wanted - 1 && !pthread_create(&threads[started], NULL, thread_main, &crew)) started++;
        work_through(&crew);
        for (long k = 0; k < started; k++) pthread_join(threads[k], NULL);
    }
    return (int)crew.failed;
}
