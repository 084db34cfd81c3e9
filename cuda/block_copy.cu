// Copies whole blocks and the first tokens of blocks between any two tiers, host memory included: one launch for a
// table of moves.
//
// A whole block is `runs` contiguous runs of `run_bytes`; its first n tokens are `outer * inner` runs of `n *
// token_bytes`. Runs are cut into pieces, and a warp copies one piece at a time. Every move has the same number of
// pieces, some of which may be empty.
#include "copy.cuh"
#include "plan.cuh"  // made of kvpool.device.block_copy.CopyPlan

constexpr int WARP = 32;
constexpr int IN_FLIGHT = 8;

struct BlockCopy {
    Plan plan;
    Int moves, count, pieces;
};

// A row of the table (source, target, tokens, bytes of a run): one load of 16 bytes, the same one in all threads of a
// warp. Each word of it is used. The compiler would give the register of an unused one to other values, and these would
// wait for the load of the next row.
__device__ __forceinline__ uint4 load_move(const BlockCopy& copy, unsigned item) {
    return __ldg(reinterpret_cast<const uint4*>(copy.moves) + item / (unsigned)copy.pieces);
}

template <class Word>
__device__ __forceinline__ void copy_piece(const Plan& copy, const uint4& move, unsigned piece) {
    const Int source = move.x, target = move.y, tokens = move.z;
    const bool whole = tokens == copy.block_tokens;
    const Int run_bytes = move.w;
    const unsigned cuts = (unsigned)((run_bytes + PIECE_BYTES - 1) / PIECE_BYTES);
    const unsigned run = piece / cuts, inner = (unsigned)copy.inner;
    if (run >= (whole ? copy.runs : copy.outer * copy.inner)) return;
    const Int start = (Int)(piece % cuts) * PIECE_BYTES;
    const int bytes = (int)(run_bytes - start < PIECE_BYTES ? run_bytes - start : PIECE_BYTES);
    const Int lane = (threadIdx.x % WARP) * (Int)sizeof(Word) + start;
    Int address[2];
#pragma unroll
    for (int end = 0; end < 2; ++end) {
        const Int block = end ? target : source;
        const bool on_host = block >= copy.device_blocks;
        const Tier& tier = on_host ? copy.host : copy.device;
        const Int place =
            whole ? run * tier.run_stride : run / inner * tier.outer_stride + run % inner * tier.inner_stride;
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

// The row of a warp's next piece is fetched before its present piece is copied: where the table is host memory, it
// takes as long.
template <class Word> __device__ __forceinline__ void copy_blocks(const BlockCopy& copy) {
    const unsigned warps = gridDim.x * (blockDim.x / WARP), items = (unsigned)(copy.count * copy.pieces);
    unsigned item = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (item >= items) return;
    uint4 move = load_move(copy, item);
    while (true) {
        const unsigned next = item + warps;
        const uint4 next_move = next < items ? load_move(copy, next) : move;
        copy_piece<Word>(copy.plan, move, item % (unsigned)copy.pieces);
        if (next >= items) return;
        item = next, move = next_move;
    }
}

#define BLOCK_COPY(bytes, Word)                                                                                       \
    extern "C" __global__ void __launch_bounds__(512, 2) block_copy_##bytes(const __grid_constant__ BlockCopy copy) { \
        copy_blocks<Word>(copy);                                                                                      \
    }
FOR_EACH_WORD(BLOCK_COPY)
