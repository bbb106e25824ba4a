#include "rl_csrc/arena.h"

#include <unistd.h>

#include <cstring>
#include <new>
#include <stdexcept>

namespace rl {
namespace {

constexpr std::size_t kPage = 4096;

std::size_t pages(std::size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }
std::uint32_t self() { return static_cast<std::uint32_t>(::getpid()); }

std::size_t tables(std::uint64_t num_blocks) {
  return pages(sizeof(ArenaHeader)) + pages(num_blocks * sizeof(BlockLine)) + pages(num_blocks * kMaxClients * 4);
}

}  // namespace

std::size_t ArenaMapping::blocks_offset() const { return pages(sizeof(ArenaHeader)); }
std::size_t ArenaMapping::counts_offset() const { return blocks_offset() + pages(num_blocks_ * sizeof(BlockLine)); }
std::size_t ArenaMapping::data_offset() const { return tables(num_blocks_); }

BlockLine& ArenaMapping::line(std::uint64_t block) const {
  return reinterpret_cast<BlockLine*>(memory_->data() + blocks_offset())[block];
}

std::atomic<std::uint32_t>& ArenaMapping::count(std::uint32_t client, std::uint64_t block) const {
  auto* counts = reinterpret_cast<std::atomic<std::uint32_t>*>(memory_->data() + counts_offset());
  return counts[client * num_blocks_ + block];
}

ArenaMapping::ArenaMapping(const char* name, std::uint64_t data_nbytes, std::uint64_t num_blocks, bool prefault)
    : num_blocks_(num_blocks),
      data_nbytes_(pages(data_nbytes)),
      memory_(SharedMemory::create(name, tables(num_blocks) + pages(data_nbytes), prefault)),
      creator_(self()) {
  ArenaHeader* h = new (memory_->data()) ArenaHeader{};
  h->num_blocks = num_blocks_;
  h->data_nbytes = data_nbytes_;
  set_self(h->clients[0].process);
  h->clients[0].state = ClientState::attached;
  std::memcpy(h->magic, kArenaMagic, sizeof(kArenaMagic));
}

ArenaMapping::ArenaMapping(int fd, bool prefault) : memory_(SharedMemory::attach(fd, prefault)), creator_(self()) {
  if (memory_->nbytes() < sizeof(ArenaHeader)) throw std::invalid_argument("the memory is too small to be an arena");
  ArenaHeader& h = header();
  num_blocks_ = h.num_blocks;
  data_nbytes_ = h.data_nbytes;
  const bool sane = std::memcmp(h.magic, kArenaMagic, sizeof(kArenaMagic)) == 0 && num_blocks_ > 0 &&
                    num_blocks_ <= memory_->nbytes() / sizeof(BlockLine) && data_nbytes_ <= memory_->nbytes() &&
                    tables(num_blocks_) <= memory_->nbytes() - data_nbytes_;
  if (!sane) throw std::invalid_argument("the memory does not hold an arena of this version");
  for (std::uint32_t c = 1; c < kMaxClients; ++c) {
    ClientState state = ClientState::free;
    if (!h.clients[c].state.compare_exchange_strong(state, ClientState::joining)) continue;
    set_self(h.clients[c].process);
    h.clients[c].state = ClientState::attached;
    client_ = c;
    return;
  }
  throw std::runtime_error("every client line of the arena is taken");
}

ArenaMapping::~ArenaMapping() {
  // Every pin holds this mapping, so none is left.
  if (client_ != 0 && creator_ == self()) header().clients[client_].state = ClientState::free;
}

std::uint64_t ArenaMapping::open(std::uint64_t block, std::uint64_t offset, std::uint64_t nbytes) {
  BlockLine& l = line(block);
  l.offset = offset;
  l.nbytes = nbytes;
  return ++l.generation;
}

void ArenaMapping::retire(std::uint64_t block) { ++line(block).generation; }

std::uint64_t ArenaMapping::pins(std::uint64_t block) const {
  std::uint64_t sum = 0;
  for (std::uint32_t c = 0; c < kMaxClients; ++c)
    if (header().clients[c].state.load() == ClientState::attached) sum += count(c, block).load();
  return sum;
}

int ArenaMapping::drop_dead_clients() {
  int dropped = 0;
  for (std::uint32_t c = 1; c < kMaxClients; ++c) {
    ClientLine& l = header().clients[c];
    if (l.state.load() != ClientState::attached || is_alive(l.process)) continue;
    for (std::uint64_t b = 0; b < num_blocks_; ++b)
      if (count(c, b).load() != 0) count(c, b).store(0);
    l.state.store(ClientState::free);
    ++dropped;
  }
  return dropped;
}

unsigned char* ArenaMapping::pin(std::uint64_t block, std::uint64_t generation, std::uint64_t& nbytes) {
  if (creator_ != self()) throw std::runtime_error("this process was forked from the one that attached the arena: attach it here too");
  if (block >= num_blocks_ || generation % 2 == 0) return nullptr;
  // Count first, look second; the owner changes the generation first and looks at the counts second. One of the two sees the
  // other, so a block is never used again under a pin.
  count(client_, block).fetch_add(1);
  BlockLine& l = line(block);
  const std::uint64_t offset = l.offset.load();
  nbytes = l.nbytes.load();
  if (l.generation.load() != generation || offset > data_nbytes_ || nbytes > data_nbytes_ - offset) {
    unpin(block);
    return nullptr;
  }
  return memory_->data() + data_offset() + offset;
}

void ArenaMapping::unpin(std::uint64_t block) {
  if (creator_ == self()) count(client_, block).fetch_sub(1);  // a forked child's copies of views hold no pin
}

}  // namespace rl
