// Delta and bucket copies over borrowed memory. Python has made the outputs; sizes are checked here again.
#include <algorithm>
#include <cstring>
#include <vector>

#include "buffers.h"
#include "exchange.h"
#include "rl_csrc/copy.h"
#include "rl_csrc/delta.h"
#include "rl_csrc/digest.h"

namespace py = pybind11;

namespace rl {
namespace {

bool is_item_size(std::size_t n) { return n == 1 || n == 2 || n == 4 || n == 8; }

// Returns (gap bytes, changed elements), or None if the delta would be larger than the room for it.
py::object encode_delta(py::handle fresh, py::handle base, std::size_t item_nbytes, py::handle table, py::handle gaps, py::handle values) {
  const auto a = borrow(fresh, false), b = borrow(base, false);
  const auto t = borrow(table, true), g = borrow(gaps, true), v = borrow(values, true);
  const std::size_t num_elements = is_item_size(item_nbytes) ? a->nbytes / item_nbytes : 0;
  if (!is_item_size(item_nbytes) || a->nbytes % item_nbytes || a->nbytes != b->nbytes || g->nbytes != v->nbytes ||
      t->nbytes != delta_num_chunks(num_elements) * sizeof(DeltaChunk))
    raise("ArgumentError", "the two tensors of a delta must have the same size, and items of 1, 2, 4 or 8 bytes");
  DeltaSizes sizes{};
  bool fits;
  {
    py::gil_scoped_release release;
    std::vector<unsigned char> scratch(delta_scratch_nbytes(item_nbytes));
    fits = delta_encode(a->data, b->data, num_elements, item_nbytes, reinterpret_cast<DeltaChunk*>(t->data), g->data, v->data,
                        g->nbytes, scratch.data(), sizes);
  }
  return fits ? py::object(py::make_tuple(sizes.gap_nbytes, sizes.num_changed)) : py::object(py::none());
}

struct Leaf {
  std::size_t out_offset, nbytes;  // of the difference; no bytes: the leaf has to be told whole
  std::uint64_t content_digest, digest;
};

// Tells how leaves of `fresh` differ from those of `base`, from leaf `first` on, and brings base up to date: one tuple
// (offset in out, bytes, digest of these, digest of the leaf) each. Ends behind a leaf that has to be told whole, when `enough` bytes
// of out are used, or where the next leaf might not fit.
py::list advance_delta(py::handle fresh, py::handle base, std::size_t item_nbytes, std::size_t leaf_nbytes, std::size_t first,
                       const py::list& list, py::handle out, std::size_t alignment, std::size_t enough, double max_fraction) {
  const auto a = borrow(fresh, false), b = borrow(base, true), o = borrow(out, true);
  std::vector<std::uint64_t> digests;
  for (const py::handle digest : list) digests.push_back(digest.cast<std::uint64_t>());
  if (!is_item_size(item_nbytes) || leaf_nbytes == 0 || leaf_nbytes % (kDeltaChunk * 8) || alignment == 0 || alignment % 8 ||
      a->nbytes % item_nbytes || a->nbytes != b->nbytes || digests.size() != (a->nbytes + leaf_nbytes - 1) / leaf_nbytes || !(max_fraction >= 0))
    raise("ArgumentError", "two tensors of the same size go into advance, items of 1, 2, 4 or 8 bytes, leaves of a multiple of 512 KiB, and a digest for each leaf");
  std::vector<Leaf> leaves;
  {
    py::gil_scoped_release release;
    const auto most = static_cast<std::size_t>(static_cast<double>(std::min<std::uint64_t>(leaf_nbytes, a->nbytes)) * max_fraction);
    std::vector<unsigned char> scratch(delta_advance_scratch_nbytes(item_nbytes, most));
    std::size_t used = 0;
    for (std::size_t index = first; index < digests.size() && used < enough; ++index) {
      const std::size_t start = index * leaf_nbytes, nbytes = std::min<std::size_t>(leaf_nbytes, a->nbytes - start);
      const auto capacity = static_cast<std::size_t>(static_cast<double>(nbytes) * max_fraction);
      if (used > o->nbytes || delta_room(nbytes / item_nbytes, capacity) > o->nbytes - used) break;
      std::uint64_t sum = digest_resume(digests[index], nbytes);
      std::size_t size = delta_advance(a->data + start, b->data + start, nbytes / item_nbytes, item_nbytes, o->data + used, capacity, scratch.data(), sum);
      if (size >= nbytes) size = 0;
      leaves.push_back({used, size, size ? digest_finish(digest_sum(o->data + used, size, 0), size) : 0, digest_finish(sum, nbytes)});
      if (size == 0) break;
      used += (size + alignment - 1) / alignment * alignment;
    }
  }
  py::list result;
  for (const Leaf& leaf : leaves) result.append(py::make_tuple(leaf.out_offset, leaf.nbytes, leaf.content_digest, leaf.digest));
  return result;
}

// With `digest`, returns that of the target afterwards; else None.
py::object apply_delta(py::handle target, std::size_t item_nbytes, py::handle table, py::handle gaps, py::handle values, bool digest) {
  const auto x = borrow(target, true), t = borrow(table, false), g = borrow(gaps, false), v = borrow(values, false);
  if (!is_item_size(item_nbytes) || x->nbytes % item_nbytes || v->nbytes % item_nbytes || t->nbytes % sizeof(DeltaChunk))
    raise("DeltaError", "the parts of the delta have sizes that do not go with items of " + std::to_string(item_nbytes) + " bytes");
  const auto* chunks = reinterpret_cast<const DeltaChunk*>(t->data);
  const std::size_t num_chunks = t->nbytes / sizeof(DeltaChunk);
  std::string error;
  std::uint64_t found = 0;
  {
    py::gil_scoped_release release;
    error = delta_check(chunks, num_chunks, g->data, g->nbytes, v->nbytes / item_nbytes, x->nbytes / item_nbytes);
    if (error.empty() && digest)
      found = digest_finish(delta_apply_digest(x->data, x->nbytes / item_nbytes, item_nbytes, chunks, g->data, v->data), x->nbytes);
    else if (error.empty())
      delta_apply(x->data, item_nbytes, chunks, num_chunks, g->data, v->data);
  }
  if (!error.empty()) raise("DeltaError", error + "; the target was not touched");
  return digest ? py::object(py::int_(found)) : py::object(py::none());
}

struct Piece {
  std::shared_ptr<Memory> tensor;
  std::uint64_t tensor_offset, bucket_offset, nbytes;
};

struct Bucket {
  std::shared_ptr<Memory> memory;
  std::vector<Piece> pieces;

  // [(tensor, tensor offset, bucket offset, nbytes), ...] in the order of the bucket; every range is checked.
  Bucket(py::handle bucket, const py::list& list, std::uint64_t used, bool packing) : memory(borrow(bucket, packing)) {
    std::uint64_t end = 0;
    pieces.reserve(list.size());
    if (used > memory->nbytes) raise("ArgumentError", "the bucket has " + std::to_string(used) + " bytes and its memory " + std::to_string(memory->nbytes));
    for (const py::handle item : list) {
      const auto f = py::reinterpret_borrow<py::tuple>(item);
      Piece p{borrow(f[0], !packing), f[1].cast<std::uint64_t>(), f[2].cast<std::uint64_t>(), f[3].cast<std::uint64_t>()};
      if (p.tensor_offset > p.tensor->nbytes || p.nbytes > p.tensor->nbytes - p.tensor_offset || p.bucket_offset % 8 || p.bucket_offset < end ||
          p.bucket_offset > used || p.nbytes > used - p.bucket_offset)
        raise("ArgumentError", "piece " + std::to_string(pieces.size()) + " does not fit its tensor or the bucket: is the plan of these tensors?");
      end = p.bucket_offset + p.nbytes;
      pieces.push_back(std::move(p));
    }
  }
};

// Moves the pieces into the bucket (packing) or out of it; of each, the digests of its leaves, one if it has no bytes.
py::list move_leaves(py::handle bucket, const py::list& list, std::uint64_t nbytes, std::uint64_t leaf_nbytes, bool packing) {
  if (leaf_nbytes == 0 || leaf_nbytes % 8) raise("ArgumentError", "leaves have " + std::to_string(leaf_nbytes) + " bytes; it must be a multiple of 8, and not 0");
  const Bucket b(bucket, list, nbytes, packing);
  std::vector<std::vector<std::uint64_t>> found(b.pieces.size());
  {
    py::gil_scoped_release release;
    for (std::size_t i = 0; i < found.size(); ++i) {
      const Piece& p = b.pieces[i];
      unsigned char *inside = b.memory->data + p.bucket_offset, *outside = p.tensor->data + p.tensor_offset;
      unsigned char *into = packing ? inside : outside, *from = packing ? outside : inside;
      std::uint64_t start = 0;
      do {
        const std::uint64_t size = std::min(leaf_nbytes, p.nbytes - start);
        found[i].push_back(digest_finish(digest_copy(into + start, from + start, size, 0), size));
        start += size;
      } while (start < p.nbytes);
    }
  }
  py::list result;
  for (const std::vector<std::uint64_t>& leaves : found) {
    py::list digests;
    for (const std::uint64_t leaf : leaves) digests.append(leaf);
    result.append(digests);
  }
  return result;
}

}  // namespace

void bind_delta(py::module_& m) {
  m.def("encode_delta", &encode_delta);
  m.def("advance_delta", &advance_delta);
  m.def("apply_delta", &apply_delta);
  m.def("move_leaves", &move_leaves);
}

}  // namespace rl
