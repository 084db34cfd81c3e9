// The kernels of engine_llama.py: numbers are scalar_t (float16 or float), sums are float. The compiler is given
// scalar_t, HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, ROWS, THREADS and THETA. A layer of the pool is keys, then values,
// each [blocks, BLOCK_TOKENS, KV_HEADS, HEAD_DIM].
#include <cupy/float16.cuh>

constexpr int GROUP = HEADS / KV_HEADS;
constexpr float LOWEST = -3e38f;

// Where a row of a step belongs. Each sequence has the same number of rows: one when it decodes, a chunk when a prompt
// is computed. Rows after the last token of a sequence are padding, which is computed and not stored.
struct Row {
    int index, sequence, position;
    long long slot;  // -1: padding

    __device__ Row(int row, int rows_each, const int* seq_lens, const int* query_start_loc, const long long* slots) {
        index = row % rows_each, sequence = row / rows_each;
        const int first = query_start_loc[sequence], count = query_start_loc[sequence + 1] - first;
        position = seq_lens[sequence] - count + index;
        slot = index < count ? slots[first + index] : -1;
    }
};

__device__ long long slot_of(const int* blocks, int position) {
    return (long long)blocks[position / BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS;
}

struct Sum {
    __device__ static float of(float a, float b) { return a + b; }
};
struct Max {
    __device__ static float of(float a, float b) { return fmaxf(a, b); }
};

// Combines one value of each thread of a block. Every thread gets the result.
template <class Combine>
__device__ float over_block(float value) {
    __shared__ float values[THREADS];
    __syncthreads();
    values[threadIdx.x] = value;
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half) values[threadIdx.x] = Combine::of(values[threadIdx.x], values[threadIdx.x + half]);
        __syncthreads();
    }
    return values[0];
}

// Random weights: evenly spread around `mean`, up to `spread` away. A hash of the place and the seed.
extern "C" __global__ void fill_random(scalar_t* out, const long long n, const unsigned seed, const float mean,
                                       const float spread) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned hash = (unsigned)i * 0x9e3779b9u + seed * 0x85ebca6bu;
    hash = (hash ^ (hash >> 16)) * 0x21f0aaadu;
    hash = (hash ^ (hash >> 15)) * 0x735a2d97u;
    hash ^= hash >> 15;
    out[i] = scalar_t(mean + spread * (hash / 2147483648.0f - 1.0f));
}

// A block for each row.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(scalar_t* out, const scalar_t* x, const scalar_t* weight, const int width) {
    const long long first = blockIdx.x * (long long)width;
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += THREADS) sum += float(x[first + i]) * float(x[first + i]);
    const float factor = 1.0f / sqrtf(over_block<Sum>(sum) / width + 1e-5f);
    for (int i = threadIdx.x; i < width; i += THREADS) {
        out[first + i] = scalar_t(float(x[first + i]) * factor * float(weight[i]));
    }
}

// x times matrix, for the rows of a decode: x [ROWS, inner], matrix [inner, columns], columns a multiple of 32. Such a
// product reads the matrix once, whatever multiplies, and a row never depends on the other rows. A block makes 32
// columns of all rows: each thread adds up four columns of every SLICES-th line, then the threads add up their sums.
extern "C" __global__ void __launch_bounds__(THREADS)
    multiply_rows(scalar_t* out, const scalar_t* x, const scalar_t* matrix, const int inner, const int columns) {
    constexpr int SLICES = THREADS / 8;
    struct alignas(4 * sizeof(scalar_t)) Four {
        scalar_t of[4];
    };
    __shared__ float sums[THREADS][4];
    const int slice = threadIdx.x / 8, column = blockIdx.x * 32 + threadIdx.x % 8 * 4;
    float mine[ROWS][4] = {};
    for (int line = slice; line < inner; line += SLICES) {
        const Four factors = *reinterpret_cast<const Four*>(matrix + (long long)line * columns + column);
        for (int row = 0; row < ROWS; ++row) {
            const float factor = float(x[row * inner + line]);
            for (int c = 0; c < 4; ++c) mine[row][c] += factor * float(factors.of[c]);
        }
    }
    for (int row = 0; row < ROWS; ++row) {
        for (int c = 0; c < 4; ++c) sums[threadIdx.x][c] = mine[row][c];
        for (int half = SLICES / 2; half; half /= 2) {
            __syncthreads();
            if (slice < half) {
                for (int c = 0; c < 4; ++c) sums[threadIdx.x][c] += sums[threadIdx.x + 8 * half][c];
            }
        }
        if (slice == 0) {
            for (int c = 0; c < 4; ++c) out[row * (long long)columns + column + c] = scalar_t(sums[threadIdx.x][c]);
        }
        __syncthreads();
    }
}

extern "C" __global__ void silu_times(scalar_t* out, const scalar_t* gate_up, const int hidden) {
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= hidden) return;
    const scalar_t* row = gate_up + blockIdx.x * 2ll * hidden;
    const float gate = float(row[i]), up = float(row[i + hidden]);
    out[blockIdx.x * (long long)hidden + i] = scalar_t(gate / (1.0f + expf(-gate)) * up);
}

// Rotates the halves of each query and key by the position, scales queries, and stores keys and values in their slots.
// A block for each row and head, a thread for each pair. The first `cached` rows of a chunk are in the pool already:
// others may be reading those blocks.
extern "C" __global__ void rope_and_store(scalar_t* queries,    // [HEADS, rows, HEAD_DIM]
                                          scalar_t* layer,      // of the pool
                                          const scalar_t* qkv,  // [rows, HEADS + 2 KV_HEADS, HEAD_DIM]
                                          const int* seq_lens, const int* query_start_loc, const long long* slots,
                                          const int rows_each, const int cached, const long long plane) {
    const Row row(blockIdx.x, rows_each, seq_lens, query_start_loc, slots);
    const int head = blockIdx.y, i = threadIdx.x, half = HEAD_DIM / 2;
    const scalar_t* from = qkv + (blockIdx.x * (long long)gridDim.y + head) * HEAD_DIM;
    float left = float(from[i]), right = float(from[i + half]);
    if (head < HEADS + KV_HEADS) {
        const float angle = row.position * powf(THETA, -2.0f * i / HEAD_DIM), c = cosf(angle), s = sinf(angle);
        const float rotated = left * c - right * s;
        right = left * s + right * c, left = rotated;
    }
    scalar_t* to;
    if (head < HEADS) {
        const float scale = 1.0f / sqrtf(HEAD_DIM);
        left *= scale, right *= scale;
        to = queries + ((long long)head * gridDim.x + blockIdx.x) * HEAD_DIM;
    } else {
        if (row.slot < 0 || row.index < cached) return;
        const int kv_head = (head - HEADS) % KV_HEADS;
        to = layer + (head < HEADS + KV_HEADS ? 0 : plane) + (row.slot * KV_HEADS + kv_head) * HEAD_DIM;
    }
    to[i] = scalar_t(left), to[i + half] = scalar_t(right);
}

// Prefill, before the matrix products: the keys and values of one sequence, from its blocks to [KV_HEADS, tokens,
// HEAD_DIM]; zeros after its end. A block for each token and KV head.
extern "C" __global__ void gather(scalar_t* keys, scalar_t* values, const scalar_t* layer, const int* blocks,
                                  const int* seq_lens, const long long plane) {
    const long long to = (blockIdx.y * (long long)gridDim.x + blockIdx.x) * HEAD_DIM + threadIdx.x;
    if (blockIdx.x < seq_lens[0]) {
        const long long from = (slot_of(blocks, blockIdx.x) * KV_HEADS + blockIdx.y) * HEAD_DIM + threadIdx.x;
        keys[to] = layer[from], values[to] = layer[plane + from];
    } else {
        keys[to] = values[to] = scalar_t(0.0f);
    }
}

// Prefill, between the matrix products: each row sees the tokens up to its own position. In place. A block for each
// row and head.
extern "C" __global__ void __launch_bounds__(THREADS)
    causal_softmax(scalar_t* scores,  // [HEADS, rows, tokens]
                   const int* seq_lens, const int* query_start_loc, const long long* slots, const int tokens) {
    const Row row(blockIdx.x, gridDim.x, seq_lens, query_start_loc, slots);
    scalar_t* mine = scores + (blockIdx.y * (long long)gridDim.x + blockIdx.x) * tokens;
    float most = LOWEST, sum = 0;
    for (int i = threadIdx.x; i <= row.position; i += THREADS) most = fmaxf(most, float(mine[i]));
    most = over_block<Max>(most);
    for (int i = threadIdx.x; i <= row.position; i += THREADS) sum += expf(float(mine[i]) - most);
    sum = over_block<Sum>(sum);
    for (int i = threadIdx.x; i < tokens; i += THREADS) {
        mine[i] = scalar_t(i <= row.position ? expf(float(mine[i]) - most) / sum : 0.0f);
    }
}

// Decode: attention of the last token of each sequence, read from the pool through the block table. A block for each
// sequence and KV head takes THREADS tokens at a time: first each thread scores one token for all query heads of the
// group, then each adds up one dimension of the values of every WAYS-th token.
extern "C" __global__ void __launch_bounds__(THREADS)
    paged_decode(scalar_t* out,            // [sequences, HEADS, HEAD_DIM]
                 const scalar_t* queries,  // [HEADS, sequences, HEAD_DIM]
                 const scalar_t* layer, const int* table, const int columns, const int* seq_lens,
                 const long long plane) {
    constexpr int WAYS = THREADS / HEAD_DIM;
    __shared__ float query[GROUP][HEAD_DIM], weights[GROUP][THREADS];
    __shared__ long long places[THREADS];
    const int sequence = blockIdx.x, kv_head = blockIdx.y, thread = threadIdx.x;
    const int dimension = thread % HEAD_DIM, way = thread / HEAD_DIM, length = seq_lens[sequence];
    for (int g = way; g < GROUP; g += WAYS) {
        const long long head = kv_head * GROUP + g;
        query[g][dimension] = float(queries[(head * gridDim.x + sequence) * HEAD_DIM + dimension]);
    }
    // The softmax of the tokens so far: the largest score, and sums of weights relative to it.
    float most[GROUP], sum[GROUP], mixed[GROUP];
    for (int g = 0; g < GROUP; ++g) most[g] = LOWEST, sum[g] = mixed[g] = 0;
    __syncthreads();
    for (int first = 0; first < length; first += THREADS) {
        const bool inside = first + thread < length;
        float scores[GROUP] = {};
        if (inside) {
            const long long slot = slot_of(table + (long long)sequence * columns, first + thread);
            places[thread] = (slot * KV_HEADS + kv_head) * HEAD_DIM;
            for (int d = 0; d < HEAD_DIM; ++d) {
                const float key = float(layer[places[thread] + d]);
                for (int g = 0; g < GROUP; ++g) scores[g] += query[g][d] * key;
            }
        }
        for (int g = 0; g < GROUP; ++g) {
            const float top = fmaxf(most[g], over_block<Max>(inside ? scores[g] : LOWEST));
            const float before = expf(most[g] - top);
            weights[g][thread] = inside ? expf(scores[g] - top) : 0.0f;
            sum[g] = sum[g] * before + weights[g][thread], mixed[g] *= before, most[g] = top;
        }
        __syncthreads();
        for (int t = way; t < THREADS && first + t < length; t += WAYS) {
            const float value = float(layer[plane + places[t] + dimension]);
            for (int g = 0; g < GROUP; ++g) mixed[g] += weights[g][t] * value;
        }
        __syncthreads();
    }
    for (int g = 0; g < GROUP; ++g) {
        const float total = over_block<Sum>(sum[g]);
        weights[g][thread] = mixed[g];
        __syncthreads();
        if (way == 0) {
            float value = 0;
            for (int w = 0; w < WAYS; ++w) value += weights[g][w * HEAD_DIM + dimension];
            const long long head = kv_head * GROUP + g;
            out[(sequence * (long long)HEADS + head) * HEAD_DIM + dimension] = scalar_t(length ? value / total : 0.0f);
        }
    }
}
