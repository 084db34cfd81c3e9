// Copies fragments as copy_fragments.cu does, by the copy unit of a multiprocessor. A thread block is one warp with a ring
// of stages: it loads a piece into each, and stores from the oldest, so that its registers hold no data.
//
// All addresses, distances and lengths are multiples of 16 bytes.
#include "bulk.cuh"

constexpr unsigned WORD = 16, PIECE = 256, STAGES = 10, AHEAD = 8;

// The bytes of a piece lie in the stage one after the other. Each lane has every 32nd run of it.
template <bool loads>
__device__ __forceinline__ void copy_piece(const Fragment& fragment, unsigned piece, unsigned char* stage, Barrier* full) {
    const unsigned words = fragment.run_bytes / WORD, all = words * fragment.runs, first = piece * PIECE;
    const unsigned end = all < first + PIECE ? all : first + PIECE;
    if (loads && threadIdx.x == 0) expect(full, first < end ? (end - first) * WORD : 0);
    __syncwarp();
    for (unsigned run = first / words + threadIdx.x; run * words < end; run += WARP) {
        const unsigned begin = run * words > first ? run * words : first;
        const unsigned bytes = ((run + 1) * words < end ? (run + 1) * words : end) - begin;
        const Int inside = (Int)(begin - run * words) * WORD;
        unsigned char* const place = stage + (begin - first) * WORD;
        if (loads)
            bulk_load(place, fragment.source + run * fragment.source_step + inside, bytes * WORD, full);
        else
            bulk_store(fragment.target + run * fragment.target_step + inside, place, bytes * WORD);
    }
}

template <class Table> __device__ __forceinline__ void copy_table(const Table& table) {
    alignas(128) __shared__ unsigned char stage[STAGES][PIECE * WORD];
    alignas(8) __shared__ Barrier full[STAGES];
    // The rows of 64 turns: they are fetched 32 at a time, so that a table in host memory is no round trip for a piece.
    alignas(16) __shared__ Row rows[2][WARP];
    const unsigned items = (unsigned)(table.count * table.pieces), lane = threadIdx.x;
    const unsigned turns = blockIdx.x < items ? (items - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
    if (lane < STAGES) init(&full[lane]);
    __syncwarp();
    Row fetched = {};
    if (lane < turns) fetched = table.row(blockIdx.x + lane * gridDim.x);
    for (unsigned turn = 0; turn < turns + AHEAD; ++turn) {
        if (turn < turns) {
            if (turn % WARP == 0) {
                rows[turn / WARP % 2][lane] = fetched;
                const unsigned later = turn + WARP + lane;
                if (later < turns) fetched = table.row(blockIdx.x + later * gridDim.x);
            }
            // What was stored from this stage has been read: it was the group before those that may be left.
            wait_until_read<STAGES - AHEAD - 1>();
            __syncwarp();
            const unsigned piece = (blockIdx.x + turn * gridDim.x) % (unsigned)table.pieces;
            copy_piece<true>(rows[turn / WARP % 2][turn % WARP].fragment(), piece, stage[turn % STAGES], &full[turn % STAGES]);
        }
        if (turn >= AHEAD && turn - AHEAD < turns) {
            const unsigned old = turn - AHEAD, piece = (blockIdx.x + old * gridDim.x) % (unsigned)table.pieces;
            wait_for(&full[old % STAGES], old / STAGES % 2);
            copy_piece<false>(rows[old / WARP % 2][old % WARP].fragment(), piece, stage[old % STAGES], nullptr);
            end_group();
        }
    }
    wait_until_stored();
}

extern "C" __global__ void __launch_bounds__(32) bulk_fragments(const __grid_constant__ FragmentTable table) {
    copy_table(table);
}
extern "C" __global__ void __launch_bounds__(32) bulk_fragments_few(const __grid_constant__ FewRows table) {
    copy_table(table);
}
extern "C" __global__ void __launch_bounds__(32) bulk_fragments_some(const __grid_constant__ SomeRows table) {
    copy_table(table);
}
