// Rows of ragged columns: tensors described and laid one after the other in one call, and rows dealt to equal parts.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <queue>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "buffers.h"
#include "cpu/pool.h"
#include "exchange.h"
#include "rl_csrc/copy.h"

namespace py = pybind11;

namespace rl {
namespace {

constexpr std::size_t kReleaseGil = 64 << 10;
constexpr std::int64_t kBytesPerTurn = 256 << 10;  // of a copy that two threads share
constexpr std::uint8_t kComplex = 5;  // DLPack's code; such tensors may be conjugated lazily
constexpr std::uint8_t kInt64 = 9;    // code of FRAMES.md

// A tensor whose memory can be copied as it stands.
bool describe(PyObject* object, dl::Tensor& t) {
  if (!is_plain_tensor(object) || is_negated(object)) return false;
  if (exchange().tensor_from_object(object, &t)) {
    PyErr_Clear();
    return false;
  }
  return t.device.type == dl::kCpu && t.dtype.code != kComplex && is_contiguous(t);
}

bool are_alike(const dl::Tensor& a, const dl::Tensor& b) {
  return a.ndim == b.ndim && a.dtype.code == b.dtype.code && a.dtype.bits == b.dtype.bits && a.dtype.lanes == b.dtype.lanes &&
         std::equal(a.shape + 1, a.shape + a.ndim, b.shape + 1);
}

// Where rows that differ in their first dimension alone begin and end, or None.
py::object row_offsets(const py::list& rows) {
  auto offsets = std::make_shared<std::vector<std::int64_t>>();
  offsets->reserve(rows.size() + 1);
  offsets->push_back(0);
  std::vector<std::int64_t> shape;
  dl::Tensor first{};
  for (py::handle row : rows) {
    dl::Tensor t;
    if (!describe(row.ptr(), t) || t.ndim == 0) return py::none();
    if (offsets->size() == 1) {
      shape.assign(t.shape, t.shape + t.ndim);  // t's own is good until the next is described
      first = t;
      first.shape = shape.data();
    } else if (!are_alike(first, t)) {
      return py::none();
    }
    offsets->push_back(offsets->back() + t.shape[0]);
  }
  const auto length = static_cast<std::int64_t>(offsets->size());
  return make_tensor(offsets->data(), kInt64, &length, 1, offsets, false);
}

// The int64 offsets of a ragged column, [rows + 1]. They may lie in memory that others write: who calls checks what he reads.
std::span<const std::int64_t> offsets_of(const py::object& object) {
  dl::Tensor t;
  if (!is_plain_tensor(object.ptr()) || !describe(object.ptr(), t) || t.ndim != 1 || t.dtype.code || t.dtype.bits != 64 || !t.shape[0])
    raise("ArgumentError", "offsets are a contiguous int64 tensor [rows + 1] on the CPU, not " + std::string(py::repr(py::type::of(object))));
  return {reinterpret_cast<const std::int64_t*>(address(t)), static_cast<std::size_t>(t.shape[0])};
}

// First and last offset.
py::tuple ends(const py::object& offsets) {
  const auto all = offsets_of(offsets);
  return py::make_tuple(all.front(), all.back());
}

// The offsets of some rows, counted from the first one's: (first value, one past the last, the longest row, int64 [rows + 1]).
py::tuple cut(const py::object& offsets, std::uint64_t first, std::uint64_t count, const py::list& known) {
  const auto all = offsets_of(offsets);
  if (first >= all.size() || count >= all.size() - first)
    raise("ArgumentError", std::to_string(count) + " rows from " + std::to_string(first) + " on are not among the " + std::to_string(all.size() - 1) + " that the offsets have");
  auto own = std::make_shared<std::vector<std::int64_t>>(all.begin() + first, all.begin() + first + count + 1);
  const std::int64_t start = own->front(), stop = own->back();
  std::int64_t longest = 0, previous = start;
  for (std::int64_t& offset : *own) {
    if (offset < previous) raise("ArgumentError", "offsets fall from " + std::to_string(previous) + " to " + std::to_string(offset) + ": they must rise");
    longest = std::max(longest, offset - previous);
    previous = offset;
    offset -= start;
  }
  for (py::handle each : known) {
    const auto other = offsets_of(py::reinterpret_borrow<py::object>(each));
    if (std::equal(own->begin(), own->end(), other.begin(), other.end())) return py::make_tuple(start, stop, longest, each);
  }
  const auto length = static_cast<std::int64_t>(own->size());
  return py::make_tuple(start, stop, longest, make_tensor(own->data(), kInt64, &length, 1, own, false));
}

void copy_all(const std::vector<CopyItem>& items, std::size_t nbytes) {
  if (nbytes < kReleaseGil) return copy_many(items, 1);
  py::gil_scoped_release release;
  copy_many(items, 1);
}

[[noreturn]] void raise_too_many(std::size_t nbytes) {
  raise("ArgumentError", "the pieces have more bytes than the " + std::to_string(nbytes) + " of out: give as many as they have");
}

// Copies tensors one after the other; false, and nothing is copied, if one of them cannot be copied as it stands.
bool join(const py::list& pieces, const py::object& out) {
  const auto target = borrow(out, true);
  std::vector<CopyItem> items;
  items.reserve(pieces.size());
  std::size_t cursor = 0;
  for (py::handle piece : pieces) {
    dl::Tensor t;
    if (!describe(piece.ptr(), t)) return false;
    const std::size_t nbytes = num_bytes(t);
    if (nbytes > target->nbytes - cursor) raise_too_many(target->nbytes);
    items.push_back({target->data + cursor, address(t), nbytes});
    cursor += nbytes;
  }
  copy_all(items, cursor);
  return true;
}

// Copies of tensors that a helper thread makes while the caller goes on; keeps what it reads and writes alive.
class Joining {
 public:
  Joining(py::list pieces, std::vector<std::shared_ptr<Memory>> targets, std::vector<CopyItem> items, std::vector<std::size_t> starts)
      : pieces_(std::move(pieces)), targets_(std::move(targets)), items_(std::move(items)), starts_(std::move(starts)),
        begun_(static_cast<std::int64_t>(starts_.back()), kBytesPerTurn, [this](std::int64_t begin, std::int64_t end) {
          copy_part(items_, starts_, static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
        }) {}
  ~Joining() { finish(); }
  Joining(const Joining&) = delete;
  void finish() {
    py::gil_scoped_release release;
    begun_.finish();
  }

 private:
  py::list pieces_;
  std::vector<std::shared_ptr<Memory>> targets_;
  std::vector<CopyItem> items_;
  std::vector<std::size_t> starts_;
  Begun begun_;
};

// Begins several `join`s at once; None, and nothing is copied, if a piece cannot be copied as it stands.
std::unique_ptr<Joining> begin_joins(const py::list& joins) {
  py::list kept;
  std::vector<std::shared_ptr<Memory>> targets;
  std::vector<CopyItem> items;
  std::vector<std::size_t> starts{0};
  for (py::handle each : joins) {
    const auto join = each.cast<py::tuple>();
    const auto pieces = join[0].cast<py::sequence>();
    const auto& target = targets.emplace_back(borrow(join[1], true));
    std::size_t cursor = 0;
    for (py::handle piece : pieces) {
      dl::Tensor t;
      if (!describe(piece.ptr(), t)) return nullptr;
      const std::size_t nbytes = num_bytes(t);
      if (nbytes > target->nbytes - cursor) raise_too_many(target->nbytes);
      items.push_back({target->data + cursor, address(t), nbytes});
      starts.push_back(starts.back() + nbytes);
      cursor += nbytes;
      kept.append(piece);
    }
  }
  return std::make_unique<Joining>(std::move(kept), std::move(targets), std::move(items), std::move(starts));
}

// Copies slices [start, stop) of sources, in units of `width` bytes, one after the other. A slice is (source, start, stop).
std::uint64_t join_slices(const py::list& sources, const py::list& slices, std::uint64_t width, const py::object& out) {
  if (!width) raise("ArgumentError", "width is 0: slices are counted in units of 1 byte or more");
  std::vector<std::shared_ptr<Memory>> memories;
  memories.reserve(sources.size());
  for (py::handle source : sources) memories.push_back(borrow(source, false));
  const auto target = borrow(out, true);
  std::vector<CopyItem> items;
  items.reserve(slices.size());
  std::size_t cursor = 0;
  for (py::handle slice : slices) {
    const auto part = slice.cast<py::tuple>();
    if (part.size() != 3) raise("ArgumentError", "a slice is (source, start, stop), not " + std::string(py::repr(part)));
    const auto which = part[0].cast<std::size_t>();
    const auto start = part[1].cast<std::uint64_t>(), stop = part[2].cast<std::uint64_t>();
    const std::size_t held = which < memories.size() ? memories[which]->nbytes / width : 0;
    if (which >= memories.size() || start > stop || stop > held)
      raise("ArgumentError", std::string(py::repr(part)) + " lies in none of the " + std::to_string(memories.size()) + " sources, or beyond the " +
                                 std::to_string(held) + " units of " + std::to_string(width) + " bytes that its source has");
    const std::size_t nbytes = (stop - start) * width;
    if (nbytes > target->nbytes - cursor) raise_too_many(target->nbytes);
    items.push_back({target->data + cursor, memories[which]->data + start * width, nbytes});
    cursor += nbytes;
  }
  copy_all(items, cursor);
  return cursor;
}

// Longest first, each to the part with the smallest sum (then the first) that has room.
std::vector<std::int64_t> balanced_order(const std::vector<std::int64_t>& lengths, std::int64_t num_parts) {
  const auto count = static_cast<std::int64_t>(lengths.size());
  if (num_parts < 1 || count % num_parts)
    raise("ArgumentError", std::to_string(count) + " rows cannot be dealt to " + std::to_string(num_parts) + " equal parts: use a number that divides");
  const std::int64_t most = INT64_MAX / std::max<std::int64_t>(count, 1);
  for (const std::int64_t length : lengths)
    if (length > most || length < -most)
      raise("ArgumentError", "a length is " + std::to_string(length) + ", and the sum of " + std::to_string(count) + " of these may not fit into 64 bits: scale them down");
  std::vector<std::int64_t> longest_first(lengths.size());
  std::iota(longest_first.begin(), longest_first.end(), 0);
  std::stable_sort(longest_first.begin(), longest_first.end(), [&](std::int64_t a, std::int64_t b) { return lengths[a] > lengths[b]; });
  using Part = std::pair<std::int64_t, std::int64_t>;  // sum, number
  std::priority_queue<Part, std::vector<Part>, std::greater<>> open;
  for (std::int64_t part = 0; part < num_parts; ++part) open.emplace(0, part);
  const std::int64_t room = count / num_parts;
  std::vector<std::int64_t> order(lengths.size()), filled(static_cast<std::size_t>(num_parts));
  for (const std::int64_t row : longest_first) {
    const auto [sum, part] = open.top();
    open.pop();
    order[part * room + filled[part]++] = row;
    if (filled[part] < room) open.emplace(sum + lengths[row], part);
  }
  for (std::int64_t part = 0; part < num_parts; ++part) std::sort(order.begin() + part * room, order.begin() + (part + 1) * room);
  return order;
}

}  // namespace

void bind_rows(py::module_& m) {
  m.def("row_offsets", &row_offsets, py::arg("rows"));
  m.def("ends", &ends, py::arg("offsets"));
  m.def("cut", &cut, py::arg("offsets"), py::arg("first"), py::arg("count"), py::arg("known"));
  m.def("join", &join, py::arg("pieces"), py::arg("out"));
  py::class_<Joining>(m, "Joining").def("finish", &Joining::finish);
  m.def("begin_joins", &begin_joins, py::arg("joins"));
  m.def("join_slices", &join_slices, py::arg("sources"), py::arg("slices"), py::arg("width"), py::arg("out"));
  m.def("balanced_order", [](const py::list& lengths, std::int64_t num_parts) {
    std::vector<std::int64_t> values;
    values.reserve(lengths.size());
    for (py::handle length : lengths) values.push_back(length.cast<std::int64_t>());
    const std::vector<std::int64_t> order = balanced_order(values, num_parts);
    py::list out(order.size());
    for (std::size_t i = 0; i < order.size(); ++i) PyList_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(order[i]));
    return out;
  }, py::arg("lengths"), py::arg("num_parts"));
}

}  // namespace rl
