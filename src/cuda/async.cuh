// Barriers in shared memory, bulk copies (sm_90 and later) and per-thread asynchronous copies (sm_80).
#pragma once

#include <cstdint>

#include "cuda/device.cuh"

namespace beryl::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define BERYL_BULK_COPY 1
#else
#define BERYL_BULK_COPY 0
#endif

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int n_arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_arrivals) : "memory");
}
// After the inits: makes them visible to the copy engine; other threads need a block barrier besides.
__device__ __forceinline__ void barrier_init_fence() {
#if BERYL_BULK_COPY
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier))
               : "memory");
}
// Waits until the phase with this parity (0, 1, 0, ...) is complete.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
#if BERYL_BULK_COPY
  asm volatile(
      "{ .reg .pred done;\n"
      "WAIT_%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra WAIT_%=; }" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{ .reg .pred done;\n"
      "WAIT_%=: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra WAIT_%=; }" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}
// Likewise, by a warp that shall not take issue slots from others while it waits: the hardware may suspend it for this long.
__device__ __forceinline__ void barrier_wait_suspended(uint64_t* barrier, uint32_t parity) {
#if BERYL_BULK_COPY
  asm volatile(
      "{ .reg .pred done;\n"
      "WAIT_%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1, %2;\n"
      "@!done bra WAIT_%=; }" ::"r"(shared_address(barrier)),
      "r"(parity), "r"(10'000'000u)
      : "memory");
#else
  barrier_wait(barrier, parity);
#endif
}
// Likewise, by all lanes of a warp, and with addresses of shared memory. What all lanes find is told to the compiler by a vote: else it prepares
// for lanes that go on alone, which takes 60 cycles a turn of a loop of 200 instructions.
__device__ __forceinline__ void warp_wait_suspended(uint32_t barrier, uint32_t parity) {
#if BERYL_BULK_COPY
  asm volatile(
      "{ .reg .pred done, all;\n"
      "WAIT_%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1, %2;\n"
      "vote.sync.all.pred all, done, 0xffffffff;\n"
      "@!all bra.uni WAIT_%=; }" ::"r"(barrier),
      "r"(parity), "r"(10'000'000u)
      : "memory");
#else
  asm volatile(
      "{ .reg .pred done, all;\n"
      "WAIT_%=: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "vote.sync.all.pred all, done, 0xffffffff;\n"
      "@!all bra.uni WAIT_%=; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
// The barrier gets one of its expected arrivals when all earlier copy16_async of this thread have landed.
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Likewise, and the barrier expects one more arrival for that: who is to arrive otherwise does so afterwards.
__device__ __forceinline__ void barrier_join_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

#if BERYL_BULK_COPY
// Weights are read once a token: they should leave the L2 first.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// An arrival, and so many bytes that copies will bring.
__device__ __forceinline__ void barrier_arrive_expecting(uint64_t* barrier, uint32_t n_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_bytes) : "memory");
}
// One thread: the box of a tensor map (tensor_map.h) that begins at this row.
__device__ __forceinline__ void box_copy(uint32_t to, const void* map, int row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {0, %2, 0}], [%3];" ::"r"(to),
      "l"(map), "r"(row), "r"(shared_address(barrier))
      : "memory");
}
// One thread, before the first use of a map that lies in device memory.
__device__ __forceinline__ void take_tensor_map(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// One thread: n_bytes (a multiple of 16) from global memory; the barrier's phase waits for one arrival and the bytes.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, uint32_t n_bytes, uint64_t* barrier,
                                          uint64_t policy) {
  barrier_arrive_expecting(barrier, n_bytes);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(to)),
      "l"(from), "r"(n_bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
#endif

// Registers from warps that need few to those that need many: called by all warps of a group of four. What is given must
// be given before it is taken; the launch has kThreads · registers of the kernel in all.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// A barrier of the first kThreads threads of a block, a multiple of 32.
template <int kThreads>
__device__ __forceinline__ void partial_block_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// Programmatic dependent launch in two parts (device.cuh has both in one): let the next kernel start, and wait for the
// last.
__device__ __forceinline__ void grid_launch_dependents() {
#if BERYL_BULK_COPY
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_wait_only() {
#if BERYL_BULK_COPY
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace beryl::cuda
