// The Naju scan on an NVIDIA GPU, forward and analytic backward, each one kernel behind a C ABI.
//
//   x_t = f_t x_{t-1} + v_t B_t^T      f = sigmoid(f_logit), v = sigmoid(i_logit) h
//   y_t = (alpha x_t C_t + D h_t) silu(z_t)
//
// A block owns one sequence and WIDTH channels and walks time. LANES neighbouring threads form a group that shares OWN
// channels; a thread keeps ENTRIES state entries of each of them in registers. Tokens come through shared memory, TILE
// at a time, as float32: gates are taken there once, and the tokens after a sequence's end are made to change nothing,
// so that the loops over time have fixed lengths. The forward keeps the state at every SEGMENT tokens. The backward
// takes a segment, walks it forward noting the state at every STEP tokens, then takes the steps from the last to the
// first: it rebuilds the STEP states in registers and walks back over them. No sum depends on the order of threads.
//
// THREADS of a block, LANES, ENTRIES, OWN and SEGMENT are given when compiling: the caller allocates by them.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

enum { STEP = 8 };
enum Type { FLOAT32, BFLOAT16, FLOAT16 };

// Filled in by Python; the field order is mirrored there. Strides are in elements, channels and entries contiguous.
struct Matrix {
    void *data;
    int64_t batch_stride, token_stride, type;
};
struct Problem {
    Matrix h, f_logit, i_logit, B, C, z, dy;       // inputs; z may be null
    Matrix y, dh, df_logit, di_logit, dz, dB, dC;  // outputs; dB and dC have a leading axis of channel blocks
    const float *D, *initial_state, *dstate;       // D may be null
    float *state, *dinitial_state, *dD;            // dD: a row a sequence; null without D
    float *checkpoints;                            // states every SEGMENT tokens; the forward's may be null
    const int64_t *boundaries;                     // of packed sequences, or null
    int64_t n_sequences, length, d_inner, d_state, partial_stride, reverse;
    float alpha;
};

__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int N = LANES * ENTRIES, GROUPS = THREADS / LANES, WIDTH = GROUPS * OWN;
constexpr int TILE = smaller(smaller(SEGMENT, 1024 / WIDTH), 2048 / N);
static_assert(OWN <= LANES && LANES <= 32, "a lane ends up with one total");
static_assert(THREADS % WIDTH == 0, "a thread has elements of one column");
static_assert(TILE % STEP == 0 && SEGMENT % TILE == 0, "tiles are whole steps, segments whole tiles");

typedef float Columns[TILE][WIDTH];
typedef float Entries[TILE][N];
typedef float State[OWN][ENTRIES];

struct ForwardMemory {
    Columns f, v, m;
    Entries B, C;
};
struct BackwardMemory : ForwardMemory {
    Columns dm, dv, df;
    float noted[SEGMENT / STEP][OWN * ENTRIES][THREADS];  // each thread reads only what it wrote
    float dB[GROUPS][STEP][N], dC[GROUPS][STEP][N];
};

// ---- where a block works --------------------------------------------------------------------------------------

struct Place {
    int64_t sequence, batch, first, length, channel;
    int64_t block;       // of channels
    int64_t checkpoint;  // index of this sequence's first one
    int group, lane;
};

__device__ Place place(const Problem &p) {
    Place at;
    int64_t blocks = (p.d_inner + WIDTH - 1) / WIDTH;
    at.sequence = blockIdx.x / blocks;
    at.block = blockIdx.x % blocks;
    at.channel = at.block * WIDTH;
    at.group = threadIdx.x / LANES;
    at.lane = threadIdx.x % LANES;
    if (p.boundaries) {  // clamped: nobody has checked them, as that would make the host wait
        int64_t left = p.boundaries[at.sequence], right = p.boundaries[at.sequence + 1];
        at.batch = 0;
        at.first = left < 0 ? 0 : left > p.length ? p.length : left;
        right = right > p.length ? p.length : right;
        at.length = right > at.first ? right - at.first : 0;
        at.checkpoint = at.first / SEGMENT + at.sequence;
    } else {
        at.batch = at.sequence;
        at.first = 0;
        at.length = p.length;
        at.checkpoint = at.sequence * ((p.length + SEGMENT - 1) / SEGMENT);
    }
    return at;
}

// Consecutive tokens of a matrix in the order of the walk.
struct Rows {
    void *data;
    int64_t first, stride, type;
};

__device__ __forceinline__ Rows rows(const Problem &p, const Matrix &m, const Place &at, int64_t t, int64_t column) {
    int64_t token = p.reverse ? at.first + at.length - 1 - t : at.first + t;
    int64_t first = at.batch * m.batch_stride + token * m.token_stride + column;
    return {m.data, first, p.reverse ? -m.token_stride : m.token_stride, m.type};
}

// ---- tiles between global and shared memory: a thread always handles the same elements of one -----------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ void assign(float &to, float x) { to = x; }
__device__ __forceinline__ void assign(__nv_bfloat16 &to, float x) { to = __float2bfloat16(x); }
__device__ __forceinline__ void assign(__half &to, float x) { to = __float2half(x); }

template <class T, int COLUMNS>
__device__ void load_as(float (*to)[COLUMNS], Rows from, int count, int64_t columns) {
    constexpr int across = smaller(COLUMNS, THREADS);
    for (int c = threadIdx.x % across; c < COLUMNS; c += across)
#pragma unroll 8
        for (int t = threadIdx.x / across; t < TILE; t += THREADS / across)
            to[t][c] = t < count && c < columns ? to_float(((T *)from.data)[from.first + t * from.stride + c]) : 0;
}

// Not inlined, for the sake of registers and of the time to compile. What lies outside of the matrix becomes 0.
template <int COLUMNS>
__device__ __noinline__ void load(float (*to)[COLUMNS], Rows from, int count, int64_t columns) {
    if (from.type == FLOAT32) load_as<float>(to, from, count, columns);
    if (from.type == BFLOAT16) load_as<__nv_bfloat16>(to, from, count, columns);
    if (from.type == FLOAT16) load_as<__half>(to, from, count, columns);
}

template <class T>
__device__ void store_as(const Columns &from, Rows to, int count, int64_t columns) {
    int c = threadIdx.x % WIDTH;
    if (c >= columns) return;
    for (int t = threadIdx.x / WIDTH; t < count; t += THREADS / WIDTH)
        assign(((T *)to.data)[to.first + t * to.stride + c], from[t][c]);
}

__device__ __noinline__ void store(const Columns &from, Rows to, int count, int64_t columns) {
    if (to.type == FLOAT32) store_as<float>(from, to, count, columns);
    if (to.type == BFLOAT16) store_as<__nv_bfloat16>(from, to, count, columns);
    if (to.type == FLOAT16) store_as<__half>(from, to, count, columns);
}

__device__ __forceinline__ void load_columns(Columns &to, const Problem &p, const Matrix &m, const Place &at,
                                             int64_t start, int count) {
    load<WIDTH>(to, rows(p, m, at, start, at.channel), count, p.d_inner - at.channel);
}

__device__ __forceinline__ void load_entries(Entries &to, const Problem &p, const Matrix &m, const Place &at,
                                             int64_t start, int count) {
    load<N>(to, rows(p, m, at, start, 0), count, p.d_state);
}

__device__ __forceinline__ void store_columns(const Columns &from, const Problem &p, const Matrix &m, const Place &at,
                                              int64_t start, int count) {
    store(from, rows(p, m, at, start, at.channel), count, p.d_inner - at.channel);
}

// ---- states between global memory and registers ---------------------------------------------------------------

__device__ void load_state(State &x, const float *from, const Problem &p, const Place &at) {
    for (int c = 0; c < OWN; c++)
        for (int k = 0; k < ENTRIES; k++) {
            int64_t channel = at.channel + at.group * OWN + c, entry = at.lane + k * LANES;
            x[c][k] = channel < p.d_inner && entry < p.d_state ? from[channel * p.d_state + entry] : 0.0f;
        }
}

__device__ void store_state(float *to, const State &x, const Problem &p, const Place &at) {
    for (int c = 0; c < OWN; c++)
        for (int k = 0; k < ENTRIES; k++) {
            int64_t channel = at.channel + at.group * OWN + c, entry = at.lane + k * LANES;
            if (channel < p.d_inner && entry < p.d_state) to[channel * p.d_state + entry] = x[c][k];
        }
}

// ---- arithmetic -----------------------------------------------------------------------------------------------

struct Gate { float on, off; };  // sigmoid(a) and sigmoid(-a): both keep their digits when the other is near 1

__device__ __forceinline__ Gate gate(float a) {
    float e = expf(-fabsf(a)), large = 1.0f / (1.0f + e), small = e * large;
    return a < 0 ? Gate{small, large} : Gate{large, small};
}

// Sum over the lanes of a group for each of its OWN channels. Every exchange halves the channels that a lane still
// carries; at the end lane l has the total of channel l * OWN / LANES.
__device__ __forceinline__ float sum_over_lanes(float (&values)[OWN], int lane) {
    int offset = LANES / 2;
#pragma unroll
    for (int half = OWN / 2; half > 0; half /= 2, offset /= 2) {
        bool upper = lane & offset;
#pragma unroll
        for (int c = 0; c < half; c++) {
            float given = upper ? values[c] : values[c + half], kept = upper ? values[c + half] : values[c];
            values[c] = kept + __shfl_xor_sync(0xffffffffu, given, offset, LANES);
        }
    }
#pragma unroll
    for (; offset > 0; offset /= 2) values[0] += __shfl_xor_sync(0xffffffffu, values[0], offset, LANES);
    return values[0];
}

__device__ __forceinline__ void put_total(Columns &to, int t, float (&values)[OWN], const Place &at) {
    constexpr int share = LANES / OWN;
    float total = sum_over_lanes(values, at.lane);
    if (at.lane % share == 0) to[t][at.group * OWN + at.lane / share] = total;
}

// One token: x = f x + v B^T.
__device__ __forceinline__ void advance(State &x, const ForwardMemory &s, int t, const Place &at) {
#pragma unroll
    for (int c = 0; c < OWN; c++) {
        float f = s.f[t][at.group * OWN + c], v = s.v[t][at.group * OWN + c];
#pragma unroll
        for (int k = 0; k < ENTRIES; k++) x[c][k] = f * x[c][k] + v * s.B[t][at.lane + k * LANES];
    }
}

__device__ __forceinline__ void read_out(const State &x, ForwardMemory &s, int t, const Place &at) {
    float m[OWN];
#pragma unroll
    for (int c = 0; c < OWN; c++) {
        m[c] = 0.0f;
#pragma unroll
        for (int k = 0; k < ENTRIES; k++) m[c] += x[c][k] * s.C[t][at.lane + k * LANES];
    }
    put_total(s.m, t, m, at);
}

// f and v of a tile; after the sequence's end f = 1 and v = 0.
__device__ void load_drive(ForwardMemory &s, const Problem &p, const Place &at, int64_t start, int count) {
    load_columns(s.f, p, p.f_logit, at, start, count);
    load_columns(s.v, p, p.h, at, start, count);
    load_columns(s.m, p, p.i_logit, at, start, count);
    for (int t = threadIdx.x / WIDTH, c = threadIdx.x % WIDTH; t < TILE; t += THREADS / WIDTH) {
        s.f[t][c] = t < count ? gate(s.f[t][c]).on : 1.0f;
        s.v[t][c] *= gate(s.m[t][c]).on;
    }
    load_entries(s.B, p, p.B, at, start, count);
    load_entries(s.C, p, p.C, at, start, count);
}

// ---- forward --------------------------------------------------------------------------------------------------

__device__ void write_outputs(ForwardMemory &s, const Problem &p, const Place &at, int64_t start, int count, float D) {
    load_columns(s.v, p, p.h, at, start, count);
    if (p.z.data) load_columns(s.f, p, p.z, at, start, count);
    for (int t = threadIdx.x / WIDTH, c = threadIdx.x % WIDTH; t < TILE; t += THREADS / WIDTH) {
        float y = p.alpha * s.m[t][c] + D * s.v[t][c];
        s.m[t][c] = p.z.data ? y * (s.f[t][c] * gate(s.f[t][c]).on) : y;
    }
    store_columns(s.m, p, p.y, at, start, count);
}

__device__ float skip_weight(const Problem &p, const Place &at) {
    int64_t channel = at.channel + threadIdx.x % WIDTH;
    return p.D && channel < p.d_inner ? p.D[channel] : 0.0f;
}

extern __shared__ __align__(16) char shared_memory[];

__global__ void __launch_bounds__(THREADS) forward_kernel(const __grid_constant__ Problem p) {
    ForwardMemory &s = *(ForwardMemory *)shared_memory;
    Place at = place(p);
    int64_t cells = p.d_inner * p.d_state;
    float D = skip_weight(p, at);
    State x;
    load_state(x, p.initial_state + at.sequence * cells, p, at);
    for (int64_t start = 0; start < at.length; start += TILE) {
        int count = at.length - start < TILE ? at.length - start : TILE;
        load_drive(s, p, at, start, count);
        if (p.checkpoints && start % SEGMENT == 0)
            store_state(p.checkpoints + (at.checkpoint + start / SEGMENT) * cells, x, p, at);
        __syncthreads();
        for (int step = 0; step < count; step += STEP)
#pragma unroll
            for (int t = step; t < step + STEP; t++) {
                advance(x, s, t, at);
                read_out(x, s, t, at);
            }
        __syncthreads();
        write_outputs(s, p, at, start, count, D);  // its own elements only, and so does load_drive with f, v and m
    }
    store_state(p.state + at.sequence * cells, x, p, at);
}

// ---- backward -------------------------------------------------------------------------------------------------

// What load_drive brings, and dm = alpha dy silu(z).
__device__ void load_tile(BackwardMemory &s, const Problem &p, const Place &at, int64_t start, int count) {
    load_drive(s, p, at, start, count);
    load_columns(s.dm, p, p.dy, at, start, count);
    if (p.z.data) load_columns(s.dv, p, p.z, at, start, count);
    for (int t = threadIdx.x / WIDTH, c = threadIdx.x % WIDTH; t < TILE; t += THREADS / WIDTH) {
        float dp = p.z.data ? s.dm[t][c] * (s.dv[t][c] * gate(s.dv[t][c]).on) : s.dm[t][c];
        s.dm[t][c] = p.alpha * dp;
    }
}

// One token backward: X becomes the adjoint of the state that the token met. `met` is that state, `x` the one after.
__device__ __forceinline__ void retreat(State &X, const State &met, const State &x, BackwardMemory &s, int t,
                                        const Place &at) {
    float dv[OWN], df[OWN], dB[ENTRIES] = {}, dC[ENTRIES] = {};
#pragma unroll
    for (int c = 0; c < OWN; c++) {
        int column = at.group * OWN + c;
        float f = s.f[t][column], v = s.v[t][column], dm = s.dm[t][column];
        dv[c] = df[c] = 0.0f;
#pragma unroll
        for (int k = 0; k < ENTRIES; k++) {
            int entry = at.lane + k * LANES;
            float a = X[c][k] + dm * s.C[t][entry];
            dv[c] += a * s.B[t][entry];
            df[c] += a * met[c][k];
            dB[k] += a * v;
            dC[k] += x[c][k] * dm;
            X[c][k] = a * f;
        }
    }
#pragma unroll
    for (int k = 0; k < ENTRIES; k++) {
        s.dB[at.group][t % STEP][at.lane + k * LANES] = dB[k];
        s.dC[at.group][t % STEP][at.lane + k * LANES] = dC[k];
    }
    put_total(s.dv, t, dv, at);
    put_total(s.df, t, df, at);
}

// Rebuild the states of the STEP tokens from `first` on and walk back over them.
__device__ void walk_back(State &X, BackwardMemory &s, int first, const State &noted, bool reads, const Place &at) {
    State states[STEP + 1];
#pragma unroll
    for (int c = 0; c < OWN; c++)
#pragma unroll
        for (int k = 0; k < ENTRIES; k++) states[0][c][k] = noted[c][k];
#pragma unroll
    for (int t = 0; t < STEP; t++) {
#pragma unroll
        for (int c = 0; c < OWN; c++)
#pragma unroll
            for (int k = 0; k < ENTRIES; k++) states[t + 1][c][k] = states[t][c][k];
        advance(states[t + 1], s, first + t, at);
        if (reads) read_out(states[t + 1], s, first + t, at);
    }
#pragma unroll
    for (int t = STEP - 1; t >= 0; t--) retreat(X, states[t], states[t + 1], s, first + t, at);
}

// dB and dC of STEP tokens, summed over the groups of this block.
__device__ void write_partials(const BackwardMemory &s, const Problem &p, const Place &at, int64_t start, int count) {
    int64_t partial = at.block * p.partial_stride;
    Rows dB = rows(p, p.dB, at, start, partial), dC = rows(p, p.dC, at, start, partial);
    for (int e = threadIdx.x; e < STEP * N; e += THREADS) {
        int t = e / N, entry = e % N;
        if (t >= count || entry >= p.d_state) continue;
        float dB_sum = 0.0f, dC_sum = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            dB_sum += s.dB[g][t][entry];
            dC_sum += s.dC[g][t][entry];
        }
        ((float *)dB.data)[dB.first + t * dB.stride + entry] = dB_sum;
        ((float *)dC.data)[dC.first + t * dC.stride + entry] = dC_sum;
    }
}

// The gradients of h, the logits and z from dv, df and m. A tile that is no longer needed takes the next tensor: every
// thread reads and writes only its own elements of them here. Returns this thread's share of dD.
__device__ float write_gradients(BackwardMemory &s, const Problem &p, const Place &at, int64_t start, int count,
                                 float D) {
    float dD = 0.0f;
    load_columns(s.f, p, p.f_logit, at, start, count);
    for (int t = threadIdx.x / WIDTH, c = threadIdx.x % WIDTH; t < TILE; t += THREADS / WIDTH) {
        Gate forget = gate(s.f[t][c]);
        s.df[t][c] *= forget.on * forget.off;
    }
    store_columns(s.df, p, p.df_logit, at, start, count);

    auto &z = s.df, &dz = s.m, &dp = s.dm, &h = s.v, &i_logit = s.f;
    load_columns(dp, p, p.dy, at, start, count);
    load_columns(h, p, p.h, at, start, count);
    load_columns(i_logit, p, p.i_logit, at, start, count);
    if (p.z.data) {
        load_columns(z, p, p.z, at, start, count);
        for (int t = threadIdx.x / WIDTH, c = threadIdx.x % WIDTH; t < TILE; t += THREADS / WIDTH) {
            Gate through = gate(z[t][c]);
            dz[t][c] = dp[t][c] * (p.alpha * s.m[t][c] + D * h[t][c]) * through.on * (1.0f + z[t][c] * through.off);
            dp[t][c] *= z[t][c] * through.on;
        }
        store_columns(dz, p, p.dz, at, start, count);
    }

    auto &dh = s.v, &di_logit = s.f;
    for (int t = threadIdx.x / WIDTH, c = threadIdx.x % WIDTH; t < TILE; t += THREADS / WIDTH) {
        Gate write = gate(i_logit[t][c]);
        float h_t = h[t][c];
        dD += dp[t][c] * h_t;
        di_logit[t][c] = s.dv[t][c] * h_t * (write.on * write.off);
        dh[t][c] = s.dv[t][c] * write.on + D * dp[t][c];
    }
    store_columns(dh, p, p.dh, at, start, count);
    store_columns(di_logit, p, p.di_logit, at, start, count);
    return dD;
}

// Walk a segment forward from its checkpoint and note the state at every step.
__device__ void note_states(BackwardMemory &s, const Problem &p, const Place &at, int64_t start, int count) {
    State x;
    int64_t cells = p.d_inner * p.d_state;
    load_state(x, p.checkpoints + (at.checkpoint + start / SEGMENT) * cells, p, at);
    for (int tile = 0; tile < count; tile += TILE) {
        int tokens = smaller(TILE, count - tile);
        __syncthreads();
        load_tile(s, p, at, start + tile, tokens);
        __syncthreads();
        for (int step = 0; step < tokens; step += STEP) {
#pragma unroll
            for (int j = 0; j < OWN * ENTRIES; j++)
                s.noted[(tile + step) / STEP][j][threadIdx.x] = x[j / ENTRIES][j % ENTRIES];
#pragma unroll
            for (int t = step; t < step + STEP; t++) advance(x, s, t, at);
        }
    }
}

// `sums` lies over noted[0][0], where a thread has only its own element.
__device__ void write_dD(float (&sums)[THREADS], const Problem &p, const Place &at, float dD) {
    sums[threadIdx.x] = dD;
    __syncthreads();
    int64_t channel = at.channel + threadIdx.x;
    if (!p.dD || threadIdx.x >= WIDTH || channel >= p.d_inner) return;
    float total = 0.0f;
    for (int k = threadIdx.x; k < THREADS; k += WIDTH) total += sums[k];
    p.dD[at.sequence * p.d_inner + channel] = total;
}

__global__ void __launch_bounds__(THREADS) backward_kernel(const __grid_constant__ Problem p) {
    BackwardMemory &s = *(BackwardMemory *)shared_memory;
    Place at = place(p);
    int64_t cells = p.d_inner * p.d_state;
    float D = skip_weight(p, at), dD = 0.0f;
    State X;
    load_state(X, p.dstate + at.sequence * cells, p, at);
    for (int64_t start = (at.length - 1) / SEGMENT * SEGMENT; start >= 0 && at.length > 0; start -= SEGMENT) {
        int count = at.length - start < SEGMENT ? at.length - start : SEGMENT;
        note_states(s, p, at, start, count);
        for (int tile = (count - 1) / TILE * TILE; tile >= 0; tile -= TILE) {
            int tokens = smaller(TILE, count - tile);
            if (tile + TILE < count) {  // else it is still there
                load_tile(s, p, at, start + tile, tokens);
                __syncthreads();
            }
            for (int step = (tokens - 1) / STEP * STEP; step >= 0; step -= STEP) {
                State noted;
#pragma unroll
                for (int j = 0; j < OWN * ENTRIES; j++)
                    noted[j / ENTRIES][j % ENTRIES] = s.noted[(tile + step) / STEP][j][threadIdx.x];
                walk_back(X, s, step, noted, p.z.data, at);
                __syncthreads();
                write_partials(s, p, at, start + tile + step, tokens - step);
                __syncthreads();
            }
            dD += write_gradients(s, p, at, start + tile, tokens, D);
        }
    }
    store_state(p.dinitial_state + at.sequence * cells, X, p, at);
    write_dD(s.noted[0][0], p, at, dD);
}

// ---- launching ------------------------------------------------------------------------------------------------

static cudaError_t launch(const void *kernel, const Problem &p, size_t bytes, int device, cudaStream_t stream) {
    cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (error != cudaSuccess) return error;
    int64_t blocks = p.n_sequences * ((p.d_inner + WIDTH - 1) / WIDTH);
    void *arguments[] = {(void *)&p};
    return cudaLaunchKernel(kernel, dim3((unsigned)blocks), dim3(THREADS), arguments, bytes, stream);
}

extern "C" {

// Both return 0 or a CUDA error; `device` must be torch's current device already.
int naju_forward(const Problem *p, int device, void *stream) {
    return launch((const void *)forward_kernel, *p, sizeof(ForwardMemory), device, (cudaStream_t)stream);
}

int naju_backward(const Problem *p, int device, void *stream) {
    return launch((const void *)backward_kernel, *p, sizeof(BackwardMemory), device, (cudaStream_t)stream);
}

const char *naju_error(int error) { return cudaGetErrorString((cudaError_t)error); }

}
