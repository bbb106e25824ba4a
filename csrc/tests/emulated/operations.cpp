// What a thread does with others: meetings of warps, blocks and clusters, and bytes that are sent.
#include "scheduler.h"

namespace emulated {

void fault(const char* what, const Site& at) {
  fault_text = what;
  fiber_now->at = at;
  back_to_scheduler();
  __builtin_unreachable();
}

const uint64_t* meet_warp(const char* what, unsigned mask, uint64_t value, const Site& at) {
  if (mask != 0xffffffffu || shape.threads % 32) fault("only whole warps meet here", at);
  Meeting& meeting = blocks[size_t(rank_now)].warps[threadIdx.x / 32];
  uint64_t* const values = meeting.values[meeting.number & 1];
  values[threadIdx.x & 31] = value;
  meet(meeting, 32, what, at);
  return values;
}

void meet_block(const Site& at) { meet(blocks[size_t(rank_now)].meeting, unsigned(shape.threads), "__syncthreads", at); }

void arrive_at_cluster(const Site& at) {
  if (fiber_now->has_arrived_at_cluster) fault("arrives twice at the cluster's barrier", at);
  fiber_now->has_arrived_at_cluster = true;
  fiber_now->cluster_seen = cluster.number;
  if (++cluster.arrived == unsigned(shape.cluster * shape.threads)) {
    cluster.arrived = 0;
    ++cluster.number;
  }
}

void wait_for_cluster(const Site& at) {
  if (!fiber_now->has_arrived_at_cluster) fault("waits at the cluster's barrier before it arrives", at);
  fiber_now->has_arrived_at_cluster = false;
  if (cluster.number == fiber_now->cluster_seen) wait_for("the cluster's barrier", &cluster.number, nullptr, fiber_now->cluster_seen, at);
}

void* added_shared() { return blocks[size_t(rank_now)].added.get(); }

void store_remote(void* p, uint64_t* barrier, unsigned rank, const float4& v, const Site& at) {
  if (rank >= unsigned(shape.cluster)) fault("a rank outside the cluster", at);
  if (reinterpret_cast<uintptr_t>(p) % 16) fault("a misaligned address", at);
  const Block& block = blocks[rank];
  if (!block.has_started || block.running == 0) fault("writes to a block that has not begun, or has ended", at);
  if (barrier == nullptr) {
    memcpy(in_block(int(rank), p), &v, sizeof v);
  } else {
    send({int(rank), static_cast<char*>(p), nullptr, v, sizeof v, reinterpret_cast<Barrier*>(barrier)});
    if (has_failed) fault("it failed", at);
  }
}

void fetch_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier, const Site& at) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16 || bytes == 0)
    fault("a bulk copy that is empty or not of aligned, whole multiples of 16 bytes", at);
  send({rank_now, static_cast<char*>(to), static_cast<const char*>(from), {}, bytes, reinterpret_cast<Barrier*>(barrier)});
  if (has_failed) fault("it failed", at);
}

void barrier_init(uint64_t* barrier, const Site& at) {
  auto* b = reinterpret_cast<Barrier*>(aligned(barrier, at));
  if (b->magic == Barrier::kMagic) fault("a barrier is made twice", at);
  *b = {Barrier::kMagic, 0, 1, 0};
}

void barrier_expect(uint64_t* barrier, uint32_t bytes, const Site& at) {
  auto* b = reinterpret_cast<Barrier*>(barrier);
  if (b->magic != Barrier::kMagic) fault("a barrier that is not made", at);
  if (b->pending == 0) fault("arrives twice in one phase of a barrier", at);
  b->pending = 0;
  b->bytes += int32_t(bytes);
  b->complete_if_done();
}

void barrier_wait(uint64_t* barrier, unsigned parity, const Site& at) {
  auto* b = reinterpret_cast<Barrier*>(barrier);
  if (b->magic != Barrier::kMagic) fault("a barrier that is not made", at);
  if (b->phase == parity) wait_for("a barrier of bytes", nullptr, b, parity, at);
}

}  // namespace emulated
