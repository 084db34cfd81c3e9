// What the copy kernels share: loads and stores of one machine word that leave the caches to the model, and a table of
// fragments. Addresses and distances are 64-bit integers, in bytes.
#pragma once

typedef long long Int;

template <class Word> __device__ __forceinline__ Word load(Int address) {
    return __ldcs(reinterpret_cast<const Word*>(address));
}

template <class Word> __device__ __forceinline__ void store(Int address, Word word) {
    __stcs(reinterpret_cast<Word*>(address), word);
}

// One kernel for each width of a word, in bytes: all addresses, strides and lengths of a launch are multiples of it.
#define FOR_EACH_WORD(kernel) \
    kernel(16, uint4) kernel(8, uint2) kernel(4, unsigned int) kernel(2, unsigned short) kernel(1, unsigned char)

constexpr unsigned WARP = 32;

// A fragment: `runs` contiguous runs of `run_bytes`, equally far apart at each end.
struct Fragment {
    Int source, target, source_step, target_step;
    unsigned run_bytes, runs;
};

// A row: two words for each address; bytes of a run, runs, and the steps in units of 16 bytes.
struct Row {
    uint4 ends, shape;

    __device__ __forceinline__ Fragment fragment() const {
        return {(Int)ends.y << 32 | ends.x, (Int)ends.w << 32 | ends.z, (Int)shape.z * 16, (Int)shape.w * 16, shape.x,
                shape.y};
    }
};

// A table of `count` rows, none of which has more than `pieces` pieces. A warp copies one piece at a time.
struct FragmentTable {
    Int count, pieces, rows;

    // One load of 16 bytes for each half, the same one in all threads of a warp.
    __device__ __forceinline__ Row row(unsigned item) const {
        const uint4* row = reinterpret_cast<const uint4*>(rows) + 2 * (Int)(item / (unsigned)pieces);
        return {__ldg(row), __ldg(row + 1)};
    }
};

// The same with its rows, so that the argument of a launch has all of it.
template <int most> struct RowTable {
    Int count, pieces;
    Row rows[most];

    __device__ __forceinline__ Row row(unsigned item) const { return rows[item / (unsigned)pieces]; }
};

// Arguments of 496 and of 4,080 bytes.
typedef RowTable<15> FewRows;
typedef RowTable<127> SomeRows;
