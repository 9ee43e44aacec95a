// Enough of CUDA to run scan.cu on a CPU, for tests: every thread of a block is a fiber.
//
// Between two barriers of the block a warp runs as far as it can before the next warp starts, so that a missing
// __syncthreads shows; the order of the warps, and of the threads in a warp, alternates from barrier to barrier and is
// the opposite in the next block.
// Shared memory starts as NaN. It is included before scan.cu, whose own includes must find empty files.

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __host__
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(threads)

struct dim3 { unsigned x; explicit dim3(unsigned x) : x(x) {} };
struct Index { unsigned x; };
typedef int cudaError_t;
typedef void *cudaStream_t;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

static Index threadIdx, blockIdx;
alignas(16) char shared_memory[99 * 1024];  // what the smallest chips have

// ---- half precision, rounded to nearest even -----------------------------------------------------------------

struct __nv_bfloat16 { uint16_t bits; };
typedef _Float16 __half;

static inline float __bfloat162float(__nv_bfloat16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline __nv_bfloat16 __float2bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return {0x7fff};
    return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

static inline float __half2float(__half x) { return (float)x; }
static inline __half __float2half(float x) { return (__half)x; }

// ---- threads -------------------------------------------------------------------------------------------------

enum { MOST_THREADS = 128, WARP = 32, STACK = 256 * 1024 };
enum Wait { RUNNING, AT_SHUFFLE, AT_BARRIER, DONE };

static ucontext_t scheduler, fibers[MOST_THREADS];
static char *stacks[MOST_THREADS];
static Wait waiting[MOST_THREADS];
static float exchanged[2][MOST_THREADS];
static unsigned exchanges[MOST_THREADS];
static void (*body)(void);

static void give_up(const char *reason) {
    fprintf(stderr, "%s\n", reason);
    abort();
}

static void pause_at(Wait where) {
    unsigned thread = threadIdx.x;
    waiting[thread] = where;
    swapcontext(&fibers[thread], &scheduler);
    waiting[thread] = RUNNING;
}

static void __syncthreads(void) { pause_at(AT_BARRIER); }

// Two buffers in turn: a lane may start the next exchange before another has read this one.
static float __shfl_xor_sync(unsigned mask, float value, int offset, int width) {
    unsigned thread = threadIdx.x, turn = exchanges[thread]++ % 2;
    if (mask != 0xffffffffu || offset >= width) give_up("a shuffle reaches out of its group");
    exchanged[turn][thread] = value;
    pause_at(AT_SHUFFLE);
    return exchanged[turn][thread ^ offset];
}

static void fiber(void) {
    body();
    pause_at(DONE);
}

static void resume(unsigned thread) {
    threadIdx.x = thread;
    swapcontext(&scheduler, &fibers[thread]);
}

// Run a warp until all its threads stand at a barrier of the block, or are done.
static bool run_warp(unsigned first, bool backward) {
    for (;;) {
        for (unsigned lane = 0; lane < WARP; lane++) resume(first + (backward ? WARP - 1 - lane : lane));
        for (unsigned lane = 1; lane < WARP; lane++)
            if (waiting[first + lane] != waiting[first]) give_up("threads of a warp went different ways");
        if (waiting[first] != AT_SHUFFLE) return waiting[first] == DONE;
    }
}

static void run_block(unsigned threads) {
    memset(shared_memory, 0xff, sizeof shared_memory);
    for (unsigned thread = 0; thread < threads; thread++) {
        if (!stacks[thread]) stacks[thread] = (char *)malloc(STACK);
        getcontext(&fibers[thread]);
        fibers[thread].uc_stack.ss_sp = stacks[thread];
        fibers[thread].uc_stack.ss_size = STACK;
        fibers[thread].uc_link = &scheduler;
        exchanges[thread] = 0;
        makecontext(&fibers[thread], fiber, 0);
    }
    unsigned warps = threads / WARP, done = 0;
    for (bool backward = blockIdx.x % 2; done == 0; backward = !backward) {
        for (unsigned k = 0; k < warps; k++) done += run_warp((backward ? warps - 1 - k : k) * WARP, backward);
        if (done % warps != 0) give_up("warps of a block went different ways");
    }
}

struct Problem;
static const Problem *argument;
static const void *launched;
static void call_kernel(void);

static cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t bytes,
                                    cudaStream_t) {
    if (bytes > sizeof shared_memory || block.x > MOST_THREADS) return cudaErrorInvalidValue;
    launched = kernel;
    argument = (const Problem *)arguments[0];
    body = call_kernel;
    for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) run_block(block.x);
    return cudaSuccess;
}

static cudaError_t cudaSetDevice(int) { return cudaSuccess; }
static cudaError_t cudaFuncSetAttribute(const void *, int, int) { return cudaSuccess; }
static const char *cudaGetErrorString(cudaError_t error) { return error ? "invalid value" : "no error"; }
