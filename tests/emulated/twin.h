// Runs the kernels of a CUDA source on the CPU, for the emulated driver. A block runs one thread after the other, or,
// where threads wait for each other, one fiber for each thread. It shows nothing about threads racing.
#pragma once
#define __CUDACC_RTC__ 1
#define __CUDA_ARCH__ 800
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <ucontext.h>
#include <utility>

#include "shim.h"

#define __host__
#define __constant__ static
#define __noinline__
#define __shared__ static
#define __syncwarp(...) __syncthreads()

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;
template <class T>
T atomicAdd(T* address, T value) {
    T old = *address;
    *address = old + value;
    return old;
}
template <class T>
T atomicMax(T* address, T value) {
    T old = *address;
    if (old < value) *address = value;
    return old;
}
template <class T>
T atomicMin(T* address, T value) {
    T old = *address;
    if (value < old) *address = value;
    return old;
}
static inline void __threadfence() {}

namespace twin {

constexpr size_t STACK = 64 << 10;
static ucontext_t scheduler, *fibers;
static char* stacks;
static bool* over;
static unsigned running;

static void wait() { swapcontext(&fibers[running], &scheduler); }

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** parameters, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(parameters[I])...);
}

static void (*body)(void**);
static void** arguments;
static void fiber() {
    body(arguments);
    over[running] = true;
    swapcontext(&fibers[running], &scheduler);
}

static Dim3 place(unsigned i, Dim3 extent) { return {i % extent.x, i / extent.x % extent.y, i / extent.x / extent.y}; }

// All threads of a block, each up to where it waits for the others, until all are over.
static void run_fibers(unsigned threads) {
    static unsigned room;
    if (room < threads) {
        room = threads;
        fibers = static_cast<ucontext_t*>(realloc(fibers, room * sizeof *fibers));
        stacks = static_cast<char*>(realloc(stacks, room * STACK));
        over = static_cast<bool*>(realloc(over, room));
    }
    for (unsigned i = 0; i < threads; ++i) {
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = stacks + i * STACK, fibers[i].uc_stack.ss_size = STACK, fibers[i].uc_link = nullptr;
        makecontext(&fibers[i], fiber, 0);
        over[i] = false;
    }
    for (bool any = true; any;) {
        any = false;
        for (running = 0; running < threads; ++running) {
            if (over[running]) continue;
            any = true;
            threadIdx = place(running, blockDim);
            swapcontext(&scheduler, &fibers[running]);
        }
    }
}

template <bool waits>
void run(void (*one)(void**), void** parameters, const unsigned* grid, const unsigned* block, unsigned first,
         unsigned count) {
    gridDim = {grid[0], grid[1], grid[2]}, blockDim = {block[0], block[1], block[2]};
    const unsigned threads = block[0] * block[1] * block[2];
    body = one, arguments = parameters;
    for (unsigned i = first; i < first + count; ++i) {
        blockIdx = place(i, gridDim);
        if (waits)
            run_fibers(threads);
        else
            for (unsigned t = 0; t < threads; ++t) threadIdx = place(t, blockDim), one(parameters);
    }
}

template <class... A>
struct Sizes {
    static constexpr size_t bytes[sizeof...(A) + 1] = {sizeof(A)..., 0};
    static constexpr int count = sizeof...(A);
};
template <class... A>
Sizes<A...> sizes_of(void (*)(A...)) {
    return {};
}
template <class... A>
std::index_sequence_for<A...> places_of(void (*)(A...)) {
    return {};
}

}  // namespace twin

static inline void __syncthreads() { twin::wait(); }

struct Twin {
    void (*run)(void**, const unsigned*, const unsigned*, unsigned, unsigned, unsigned);
    const size_t* sizes;
    int parameters;
};

// WAITS says whether threads of the source wait for each other.
#define TWIN(kernel)                                                                                         \
    static void one_##kernel(void** parameters) { twin::call(kernel, parameters, twin::places_of(kernel)); } \
    static void run_twin_##kernel(void** p, const unsigned* g, const unsigned* b, unsigned, unsigned first,  \
                                  unsigned count) {                                                          \
        twin::run<WAITS>(one_##kernel, p, g, b, first, count);                                               \
    }                                                                                                        \
    extern "C" __attribute__((visibility("default"))) Twin emu_twin_##kernel = {                             \
        run_twin_##kernel, decltype(twin::sizes_of(kernel))::bytes, decltype(twin::sizes_of(kernel))::count};
