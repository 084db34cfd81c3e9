// Copies fragments between any two places, host memory included: one launch for a table of them.
//
// The words of a fragment, the widest that fit, are cut into pieces, which may have a part of a run or many runs. A
// warp copies one piece at a time: all of it is loaded before any of it is stored.
#include "copy.cuh"

constexpr unsigned IN_FLIGHT = 8, PIECE = WARP * IN_FLIGHT;

// The words of a fragment at one end, as one lane walks them: each step is a warp's words further on.
template <class Word> struct Walk {
    Int address, step, carry;
    unsigned words, word;

    __device__ __forceinline__ Walk(Int start, Int run_step, unsigned words, unsigned first)
        : address(start + first / words * run_step + first % words * (Int)sizeof(Word)),
          step(WARP / words * run_step + WARP % words * (Int)sizeof(Word)),
          carry(run_step - words * (Int)sizeof(Word)),
          words(words),
          word(first % words) {}

    __device__ __forceinline__ void advance() {
        address += step, word += WARP % words;
        if (word >= words) word -= words, address += carry;
    }
};

template <class Word> __device__ __forceinline__ void copy_piece(const Fragment& fragment, unsigned piece) {
    const unsigned words = fragment.run_bytes / (unsigned)sizeof(Word), all = words * fragment.runs;
    const unsigned first = piece * PIECE + threadIdx.x % WARP;
    Word data[IN_FLIGHT] = {};
    Walk<Word> source(fragment.source, fragment.source_step, words, first);
#pragma unroll
    for (unsigned i = 0; i < IN_FLIGHT; ++i, source.advance())
        if (first + i * WARP < all) data[i] = load<Word>(source.address);
    Walk<Word> target(fragment.target, fragment.target_step, words, first);
#pragma unroll
    for (unsigned i = 0; i < IN_FLIGHT; ++i, target.advance())
        if (first + i * WARP < all) store<Word>(target.address, data[i]);
}

// The row of a warp's next piece is fetched before its present piece is copied: where the table is host memory, it
// takes as long.
template <class Table> __device__ __forceinline__ void copy_table(const Table& table) {
    const unsigned warps = gridDim.x * (blockDim.x / WARP), items = (unsigned)(table.count * table.pieces);
    unsigned item = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (item >= items) return;
    Row row = table.row(item);
    while (true) {
        const Fragment fragment = row.fragment();
        const unsigned piece = item % (unsigned)table.pieces;
        item += warps;
        if (item < items) row = table.row(item);
        const unsigned crooked = (unsigned)fragment.source | (unsigned)fragment.target | fragment.run_bytes;
        if (crooked % 16 == 0)
            copy_piece<uint4>(fragment, piece);
        else if (crooked % 4 == 0)
            copy_piece<unsigned>(fragment, piece);
        else
            copy_piece<unsigned char>(fragment, piece);
        if (item >= items) return;
    }
}

extern "C" __global__ void __launch_bounds__(512, 2) copy_fragments(const __grid_constant__ FragmentTable table) {
    copy_table(table);
}
extern "C" __global__ void __launch_bounds__(512, 2) copy_fragments_few(const __grid_constant__ FewRows table) {
    copy_table(table);
}
extern "C" __global__ void __launch_bounds__(512, 2) copy_fragments_some(const __grid_constant__ SomeRows table) {
    copy_table(table);
}
