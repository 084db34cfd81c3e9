// Copies whole blocks and the first tokens of blocks between any two tiers, host memory included: one launch for a table of moves.
//
// A whole block is `runs` contiguous runs of `run_bytes`; its first n tokens are `outer * inner` runs of `n * token_bytes`. Runs are cut
// into pieces, and a warp copies one piece at a time. Every move has the same number of pieces, some of which may be empty.
#include "copy.cuh"

constexpr int WARP = 32;
constexpr int IN_FLIGHT = 8;
constexpr int PIECE_BYTES = 4096;

struct Tier {
    Int base, block_stride, run_stride, outer_stride, inner_stride;
};

struct BlockCopy {
    Tier device, host;
    Int device_blocks, blocks, tokens_per_block, streaming, runs, run_bytes, outer, inner, token_bytes;
    Int moves, count, pieces;
};

struct Move {
    Int source, target, tokens, ticket;
};

template <class Word> __device__ __forceinline__ void copy_piece(const BlockCopy& copy, const Move* move, unsigned piece) {
    const Int source = __ldg(&move->source), target = __ldg(&move->target), tokens = __ldg(&move->tokens);
    const bool whole = tokens == copy.tokens_per_block;
    const Int run_bytes = whole ? copy.run_bytes : tokens * copy.token_bytes;
    const unsigned cuts = (unsigned)((run_bytes + PIECE_BYTES - 1) / PIECE_BYTES);
    const unsigned run = piece / cuts, inner = (unsigned)copy.inner;
    if (run >= (whole ? copy.runs : copy.outer * copy.inner)) return;
    const Int start = (Int)(piece % cuts) * PIECE_BYTES;
    const Int bytes = run_bytes - start < PIECE_BYTES ? run_bytes - start : PIECE_BYTES;
    const Int lane = (threadIdx.x % WARP) * (Int)sizeof(Word) + start;
    Int address[2];
#pragma unroll
    for (int end = 0; end < 2; ++end) {
        const Int block = end ? target : source;
        const bool on_host = block >= copy.device_blocks;
        const Tier& tier = on_host ? copy.host : copy.device;
        const Int place = whole ? run * tier.run_stride : run / inner * tier.outer_stride + run % inner * tier.inner_stride;
        address[end] = tier.base + (on_host ? block - copy.device_blocks : block) * tier.block_stride + place + lane;
    }
    constexpr int ROUND_BYTES = WARP * IN_FLIGHT * sizeof(Word);
    for (int done = (threadIdx.x % WARP) * sizeof(Word); done < bytes; done += ROUND_BYTES) {
        Word word[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int ahead = i * WARP * (int)sizeof(Word);
            if (done + ahead < bytes) word[i] = load<Word>(address[0] + ahead);
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int ahead = i * WARP * (int)sizeof(Word);
            if (done + ahead < bytes) store<Word>(address[1] + ahead, word[i]);
        }
        address[0] += ROUND_BYTES, address[1] += ROUND_BYTES;
    }
}

#define BLOCK_COPY(bytes, Word)                                                                                        \
    extern "C" __global__ void __launch_bounds__(512, 2) block_copy_##bytes(const __grid_constant__ BlockCopy copy) {  \
        const unsigned warps = gridDim.x * (blockDim.x / WARP), items = (unsigned)(copy.count * copy.pieces);          \
        const Move* moves = reinterpret_cast<const Move*>(copy.moves);                                                 \
        for (unsigned item = (blockIdx.x * blockDim.x + threadIdx.x) / WARP; item < items; item += warps)              \
            copy_piece<Word>(copy, moves + item / (unsigned)copy.pieces, item % (unsigned)copy.pieces);                \
    }
FOR_EACH_WORD(BLOCK_COPY)
