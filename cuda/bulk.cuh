// Bulk copies between any memory and that of a multiprocessor, by its copy unit: PTX of sm_90 and later. A barrier's phase
// is over once as many bytes as were expected have come.
#pragma once
#include "copy.cuh"

typedef unsigned long long Barrier;

#ifndef OWN_BULK_COPIES  // Whoever builds this for a CPU brings them.
__device__ __forceinline__ unsigned place(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

__device__ __forceinline__ void init(Barrier* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(place(barrier)) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void expect(Barrier* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(place(barrier)), "r"(bytes) : "memory");
}

// Waits until the phase of this parity is over.
__device__ __forceinline__ void wait_for(Barrier* barrier, unsigned parity) {
    unsigned over = 0;
    while (!over)
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(over)
            : "r"(place(barrier)), "r"(parity)
            : "memory");
}

// The target is this thread block's own memory. Where PTX cannot say so (before CUDA 12.8), it is memory of a cluster, and
// sm_120, whose copy units reach no other thread block, gets a branch to __cuda_syscall_cp_async_bulk_unicast for
// addresses of another one. It is never taken: there are no clusters here.
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8)
#define STAGE_SPACE "shared::cta"
#else
#define STAGE_SPACE "shared::cluster"
#endif

__device__ __forceinline__ void bulk_load(void* target, Int source, unsigned bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk." STAGE_SPACE ".global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     place(target)),
                 "l"(source), "r"(bytes), "r"(place(barrier))
                 : "memory");
}

__device__ __forceinline__ void bulk_store(Int target, const void* source, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(place(source)),
                 "r"(bytes)
                 : "memory");
}

// The stores of this thread since the last call are a group.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until no more than so many groups of this thread have still to be read from where they came.
template <int groups> __device__ __forceinline__ void wait_until_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(groups) : "memory");
}

__device__ __forceinline__ void wait_until_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#endif
