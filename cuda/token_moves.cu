// Moves tokens to other slots of the device tier, all layers, planes and heads: one launch for the tokens of many
// sequences.
//
// The moves of a group are made in order, since one may write what an earlier one reads. A thread owns one word of a
// token, in one run of a block, and makes all moves of a group for it: what it overwrites, it alone has read. The moves
// are part of the argument, so that nothing of the caller's is read later.
#include "copy.cuh"
#include "plan.cuh"  // made of kvpool.device.copy_plan.CopyPlan

constexpr int MOVES = 320;
constexpr int IN_FLIGHT = 4;

struct TokenMoves {
    Plan plan;
    Int groups;
    unsigned ends[MOVES];  // of each group
    unsigned source[MOVES], target[MOVES];
};

__device__ __forceinline__ Int place(const Plan& plan, unsigned slot) {
    const unsigned width = (unsigned)plan.block_tokens;
    return slot / width * plan.device.block_stride + slot % width * plan.token_bytes;
}

template <class Word> __device__ __forceinline__ void move_tokens(const TokenMoves& job) {
    const Plan& plan = job.plan;
    const unsigned words = (unsigned)plan.token_bytes / (unsigned)sizeof(Word), inner = (unsigned)plan.inner;
    const Int columns = plan.outer * plan.inner * words, step = (Int)gridDim.x * blockDim.x;
    for (Int item = (Int)blockIdx.x * blockDim.x + threadIdx.x; item < job.groups * columns; item += step) {
        const unsigned group = (unsigned)(item / columns), column = (unsigned)(item % columns), run = column / words;
        const Int base =
            plan.device.base + run / inner * plan.device.outer_stride + run % inner * plan.device.inner_stride +
            column % words * (Int)sizeof(Word);
        const unsigned end = job.ends[group];
        for (unsigned i = group ? job.ends[group - 1] : 0; i < end; i += IN_FLIGHT) {
            // No move reads what an earlier one wrote, so that several may be read before the first is written.
            Word word[IN_FLIGHT];
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; ++k) {
                if (i + k < end) word[k] = load<Word>(base + place(plan, job.source[i + k]));
            }
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; ++k) {
                if (i + k < end) store<Word>(base + place(plan, job.target[i + k]), word[k]);
            }
        }
    }
}

#define MOVE_TOKENS(bytes, Word)                                                                                      \
    extern "C" __global__ void __launch_bounds__(512, 2) move_tokens_##bytes(const __grid_constant__ TokenMoves job) {\
        move_tokens<Word>(job);                                                                                       \
    }
FOR_EACH_WORD(MOVE_TOKENS)
