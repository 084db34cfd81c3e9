// Runs the kernels of a CUDA source on the CPU, for the emulated driver.
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
#include <utility>

#include "shim.h"

#define __host__
#define __constant__ static
#define __noinline__

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

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** parameters, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(parameters[I])...);
}

static Dim3 place(unsigned i, Dim3 extent) { return {i % extent.x, i / extent.x % extent.y, i / extent.x / extent.y}; }

template <bool waits>
void run(void (*one)(void**), void** parameters, const unsigned* grid, const unsigned* block, unsigned first,
         unsigned count) {
    gridDim = {grid[0], grid[1], grid[2]}, blockDim = {block[0], block[1], block[2]};
    const unsigned threads = block[0] * block[1] * block[2];
    for (unsigned i = first; i < first + count; ++i) {
        blockIdx = place(i, gridDim);
        fibers::run<waits>(threads, [&](unsigned thread) {
            threadIdx = place(thread, blockDim);
            one(parameters);
        });
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
