// Just enough of CUDA to run the kernels on a CPU, one thread after the other. It shows nothing about threads racing.
#pragma once
#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct Dim3 {
    unsigned x, y, z;
};
static thread_local Dim3 threadIdx, blockIdx, blockDim, gridDim;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};

template <class T> T __ldcs(const T* address) { return *address; }
// How often a thread has read a table: each is a load of a lane's, of which a warp makes one where all lanes want the same.
static unsigned long table_loads;
template <class T> T __ldg(const T* address) {
    ++table_loads;
    return *address;
}
template <class T> void __stcs(T* address, T value) { *address = value; }

template <class Record> void run(void (*kernel)(Record), const void* record, unsigned thread_blocks, unsigned threads) {
    gridDim = {thread_blocks, 1, 1}, blockDim = {threads, 1, 1};
    for (unsigned block = 0; block < thread_blocks; ++block) {
        for (unsigned thread = 0; thread < threads; ++thread) {
            blockIdx = {block, 0, 0}, threadIdx = {thread, 0, 0};
            kernel(*static_cast<const Record*>(record));
        }
    }
}

extern "C" unsigned long take_table_loads() {
    const unsigned long found = table_loads;
    table_loads = 0;
    return found;
}

#define SHIM(kernel, Record)                                                                               \
    extern "C" unsigned long run_##kernel(const void* record, unsigned thread_blocks, unsigned threads) {  \
        if (thread_blocks) run(kernel, record, thread_blocks, threads);                                    \
        return sizeof(Record);                                                                             \
    }
