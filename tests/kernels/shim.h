// Just enough of CUDA to run the kernels on a CPU. A block runs one thread after the other, or, where threads wait for
// each other, one fiber for each thread. It shows nothing about threads racing.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __syncwarp(...) __syncthreads()

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

namespace fibers {

constexpr size_t STACK = 64 << 10;
static ucontext_t scheduler, *contexts;
static char* stacks;
static bool* over;
static unsigned running, room;
static void (*body)(void*, unsigned);
static void* argument;

static void wait() { swapcontext(&contexts[running], &scheduler); }

static void one() {
    body(argument, running);
    over[running] = true;
    wait();
}

// All threads of a block: each up to where it waits for the others, until all are over.
template <bool waits, class Body> void run(unsigned threads, Body each) {
    if (!waits) {
        for (unsigned thread = 0; thread < threads; ++thread) each(thread);
        return;
    }
    body = [](void* given, unsigned thread) { (*static_cast<Body*>(given))(thread); };
    argument = &each;
    if (room < threads) {
        room = threads;
        contexts = static_cast<ucontext_t*>(realloc(contexts, room * sizeof *contexts));
        stacks = static_cast<char*>(realloc(stacks, room * STACK));
        over = static_cast<bool*>(realloc(over, room));
    }
    for (unsigned i = 0; i < threads; ++i) {
        getcontext(&contexts[i]);
        contexts[i].uc_stack.ss_sp = stacks + i * STACK, contexts[i].uc_stack.ss_size = STACK;
        contexts[i].uc_link = nullptr;
        makecontext(&contexts[i], one, 0);
        over[i] = false;
    }
    std::vector<Dim3> place(threads);
    for (bool any = true; any;) {
        any = false;
        for (running = 0; running < threads; ++running) {
            if (over[running]) continue;
            any = true;
            threadIdx = place[running];
            swapcontext(&scheduler, &contexts[running]);
            place[running] = threadIdx;
        }
    }
}

}  // namespace fibers

static inline void __syncthreads() { fibers::wait(); }

// Bulk copies (bulk.cuh) as late as can be: a load when its barrier is waited for, a store when it must have been read.
// So a stage that is used too early, or again too early, has other bytes.
#define OWN_BULK_COPIES
typedef unsigned long long Barrier;

namespace bulk {

struct State {
    int bytes;
    short arrivals, phase;
};
struct Copy {
    void* target;
    const void* source;
    unsigned bytes;
    Barrier* barrier;
};
static std::vector<Copy> loads;
static std::vector<Copy> group[1024];
static std::deque<std::vector<Copy>> groups[1024];

static State& state(Barrier* barrier) { return *reinterpret_cast<State*>(barrier); }

static void check(State& state) {
    if (state.arrivals == 0 && state.bytes == 0) state.arrivals = 1, state.phase ^= 1;
}

static void store_until(size_t left) {
    for (auto& mine = groups[threadIdx.x]; mine.size() > left; mine.pop_front())
        for (const Copy& copy : mine.front()) memcpy(copy.target, copy.source, copy.bytes);
}

static void must(bool fine, const char* what) {
    if (!fine) fprintf(stderr, "bulk copies: %s\n", what), abort();
}

}  // namespace bulk

static inline void init(Barrier* barrier) { bulk::state(barrier) = {0, 1, 0}; }

static inline void expect(Barrier* barrier, unsigned bytes) {
    bulk::State& state = bulk::state(barrier);
    bulk::must(state.arrivals == 1, "a phase begins before the last one was over");
    state.arrivals = 0, state.bytes += (int)bytes;
    bulk::check(state);
}

static inline void wait_for(Barrier* barrier, unsigned parity) {
    for (int turn = 0; (unsigned)bulk::state(barrier).phase == parity; ++turn) {
        std::vector<bulk::Copy> others;
        for (const bulk::Copy& copy : bulk::loads) {
            if (copy.barrier != barrier) {
                others.push_back(copy);
                continue;
            }
            memcpy(copy.target, copy.source, copy.bytes);
            bulk::state(barrier).bytes -= (int)copy.bytes;
            bulk::check(bulk::state(barrier));
        }
        bulk::loads = others;
        bulk::must(turn < 1000, "a barrier is waited for whose bytes never come");
        if ((unsigned)bulk::state(barrier).phase == parity) fibers::wait();
    }
}

static inline void bulk_load(void* target, long long source, unsigned bytes, Barrier* barrier) {
    bulk::must(((size_t)target | (size_t)source | bytes) % 16 == 0 && bytes, "a load of no whole words");
    bulk::loads.push_back({target, reinterpret_cast<const void*>(source), bytes, barrier});
}

static inline void bulk_store(long long target, const void* source, unsigned bytes) {
    bulk::must(((size_t)target | (size_t)source | bytes) % 16 == 0 && bytes, "a store of no whole words");
    bulk::group[threadIdx.x].push_back({reinterpret_cast<void*>(target), source, bytes, nullptr});
}

static inline void end_group() {
    bulk::groups[threadIdx.x].push_back(bulk::group[threadIdx.x]);
    bulk::group[threadIdx.x].clear();
}

template <int left> void wait_until_read() { bulk::store_until(left); }
static inline void wait_until_stored() { bulk::store_until(0); }

template <bool waits, class Record>
void run(void (*kernel)(Record), const void* record, unsigned thread_blocks, unsigned threads) {
    gridDim = {thread_blocks, 1, 1}, blockDim = {threads, 1, 1};
    for (unsigned block = 0; block < thread_blocks; ++block) {
        blockIdx = {block, 0, 0};
        fibers::run<waits>(threads, [&](unsigned thread) {
            threadIdx = {thread, 0, 0};
            kernel(*static_cast<const Record*>(record));
        });
    }
}

extern "C" unsigned long take_table_loads() {
    const unsigned long found = table_loads;
    table_loads = 0;
    return found;
}

#define SHIM(kernel, Record)                                                                               \
    extern "C" unsigned long run_##kernel(const void* record, unsigned thread_blocks, unsigned threads) {  \
        if (thread_blocks) run<WAITS>(kernel, record, thread_blocks, threads);                             \
        return sizeof(Record);                                                                             \
    }
