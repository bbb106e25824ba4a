// A cluster of blocks that share a row of logits: its barriers, and the statistics that the blocks exchange.
#pragma once
#include "logprobs.cuh"

namespace rl {

constexpr int kMaxCluster = 8;

template <int THREADS>
struct Exchange {
  Stats stats[kMaxCluster * THREADS / 32];
};

__device__ __forceinline__ float4 as_vector(const Stats& st) { return {st.max, st.sum, st.dot, st.square}; }

// What every thread makes of the statistics of all the row's warps: the same bits.
template <int MODE, int ENTRIES>
__device__ __forceinline__ Stats merge_entries(const Stats* entries) {
  constexpr int kRounds = (ENTRIES + 31) / 32;
  const int lane = threadIdx.x & 31;
  Stats held[kRounds];
  float max = -INFINITY;
#pragma unroll
  for (int e = 0; e < kRounds; ++e) {
    held[e] = e * 32 + lane < ENTRIES ? entries[e * 32 + lane] : empty_stats();
    max = max_nan(max, held[e].max);
  }
  Stats st = rescale(held[0], max);
#pragma unroll
  for (int e = 1; e < kRounds; ++e) {
    const Stats more = rescale(held[e], max);
    st.sum += more.sum, st.dot += more.dot;
  }
  return warp_merge<(MODE & kDot) != 0, false>(st);
}

// Hand this warp's statistics to every block of the cluster; each store announces its bytes to the receiver's barrier. Unlike a
// cluster barrier this does not wait for the gradient stores of the row before.
template <int CLUSTER>
__device__ __forceinline__ void send_stats(Stats* entry, uint64_t* barrier, const Stats& st) {
  const int lane = threadIdx.x & 31;
  if (lane >= CLUSTER) return;
  send_remote(entry, barrier, lane, as_vector(st));
}

// The statistics of the whole row, the same bits in every thread of the cluster.
template <int MODE, int CLUSTER, int THREADS>
__device__ __forceinline__ Stats cluster_merge(Stats st, Exchange<THREADS>& shared, unsigned rank) {
  constexpr int kWarps = THREADS / 32, kEntries = CLUSTER * kWarps;
  constexpr bool kWithDot = (MODE & kDot) != 0;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  st = warp_merge<kWithDot, false>(st);
  if constexpr (CLUSTER > 1) {
    if (lane < CLUSTER) store_remote(&shared.stats[rank * kWarps + warp], lane, as_vector(st));
    cluster_arrive();
    cluster_wait();
  } else {
    if (lane == 0) shared.stats[warp] = st;
    __syncthreads();
  }
  return merge_entries<MODE, kEntries>(shared.stats);
}

}  // namespace rl
