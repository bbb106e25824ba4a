// Python objects to frame regions and back. The format itself is in frames.cpp.
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <vector>

#include "buffers.h"
#include "exchange.h"
#include "rl_csrc/copy.h"
#include "rl_csrc/digest.h"
#include "rl_csrc/frames.h"

namespace py = pybind11;

namespace rl {
namespace {

using namespace frames;

constexpr std::size_t kReleaseGil = 256 << 10;
constexpr unsigned char kZeros[kAlignment] = {};

// [DLPack code][log2 of the bits] -> dtype code. No two dtypes differ in their lanes alone.
constexpr auto kCodeTable = [] {
  std::array<std::array<std::uint8_t, 8>, 32> table{};
  for (unsigned code = 1; code < kNumDTypes; ++code) table[kDTypes[code].code][std::countr_zero(kDTypes[code].bits)] = static_cast<std::uint8_t>(code);
  return table;
}();

std::uint8_t dtype_code(const dl::DataType& type) {
  if (type.code >= kCodeTable.size() || type.bits == 0 || (type.bits & (type.bits - 1)) != 0) return 0;
  const std::uint8_t code = kCodeTable[type.code][static_cast<unsigned>(std::countr_zero(type.bits))];
  return kDTypes[code].lanes == type.lanes ? code : std::uint8_t{0};
}

// An encoded frame: its header, where its regions are, and what keeps them alive.
class Encoded {
 public:
  Encoded(const py::dict& mapping, py::function normalise, std::uint64_t tag) : normalise_(std::move(normalise)) {
    writer_.reserve(mapping.size());
    alive_.reserve(mapping.size());
    PyObject *name, *value;
    Py_ssize_t position = 0;
    // The keys and values are held while they are described: normalise may run Python code.
    while (PyDict_Next(mapping.ptr(), &position, &name, &value))
      add(py::reinterpret_borrow<py::object>(name), py::reinterpret_borrow<py::object>(value));
    if (!writer_.finish(tag)) raise("FrameError", "the names, shapes and entries of one frame must stay below 4 GiB: encode fewer values at once");
  }

  std::uint64_t nbytes() const { return writer_.nbytes(); }
  py::bytes header() const { return {reinterpret_cast<const char*>(writer_.header().data()), writer_.header().size()}; }
  const Writer& writer() const { return writer_; }

  // Stores the payload's digest in the header (reads every byte once).
  void checksum() {
    std::uint64_t sum = 0, end = 0;
    for (const Writer::Region& region : writer_.regions()) {
      sum += digest_sum(region.data, region.nbytes, region.offset / 8);
      sum += gap_digest(region);
      end = region.offset + align_up(region.nbytes);
    }
    writer_.set_payload_digest(digest_finish(sum, end));
  }

  // Copies the frame to `out`, the header last: until then the block holds no frame. With `digest` the payload's digest is
  // taken while copying.
  void write(unsigned char* out, bool digest, int num_threads) {
    const std::size_t base = writer_.header().size();
    std::uint64_t sum = 0;
    std::memset(out, 0, sizeof(Prefix));
    if (digest) {
      std::vector<DigestItem> items;
      for (const Writer::Region& r : writer_.regions()) items.push_back({{out + base + r.offset, r.data, r.nbytes}, r.offset / 8});
      sum = copy_many_digest(items, num_threads);
    } else {
      std::vector<CopyItem> items;
      for (const Writer::Region& r : writer_.regions()) items.push_back({out + base + r.offset, r.data, r.nbytes});
      copy_many(items, num_threads);
    }
    for (const Writer::Region& r : writer_.regions()) {
      const std::size_t end = base + r.offset + r.nbytes, gap = align_up(r.nbytes) - r.nbytes;
      if (gap) std::memset(out + end, 0, gap);
      if (digest) sum += gap_digest(r);
    }
    if (digest) writer_.set_payload_digest(digest_finish(sum, writer_.nbytes() - base));
    std::memcpy(out, writer_.header().data(), base);
  }

  std::vector<iovec> gather() const {
    std::vector<iovec> parts;
    parts.reserve(2 * writer_.regions().size() + 1);
    auto push = [&parts](const void* data, std::size_t nbytes) {
      if (nbytes) parts.push_back({const_cast<void*>(data), nbytes});
    };
    push(writer_.header().data(), writer_.header().size());
    for (const Writer::Region& r : writer_.regions()) {
      push(r.data, r.nbytes);
      push(kZeros, align_up(r.nbytes) - r.nbytes);
    }
    return parts;
  }

 private:
  static std::uint64_t gap_digest(const Writer::Region& r) {
    return digest_zeros((r.offset + r.nbytes + 7) / 8, (r.offset + align_up(r.nbytes)) / 8);
  }

  void add(py::object name, py::object value) {
    Py_ssize_t length = 0;
    const char* text = PyUnicode_Check(name.ptr()) ? PyUnicode_AsUTF8AndSize(name.ptr(), &length) : nullptr;
    if (!text) {
      if (PyErr_Occurred()) throw py::error_already_set();
      raise("FrameError", "a frame's names are str; this one is " + std::string(py::repr(name)));
    }
    if (length > UINT16_MAX) raise("FrameError", "a frame's names have at most 65535 bytes of UTF-8; one has " + std::to_string(length));
    const std::string_view label{text, static_cast<std::size_t>(length)};
    if (!add_plain(label, value)) {
      py::object plain = normalise_(name, value);
      if (!add_plain(label, plain, true)) raise("FrameError", "'" + std::string(label) + "' cannot be framed: " + std::string(py::repr(py::type::of(plain))));
    }
  }

  bool add_plain(std::string_view name, const py::object& value, bool normalised = false) {
    if (is_plain_tensor(value.ptr())) return add_tensor(name, value, normalised);
    if (PyTuple_Check(value.ptr())) return add_ragged(name, value, normalised);
    if (PyBytes_Check(value.ptr()) || PyByteArray_Check(value.ptr()) || (normalised && PyMemoryView_Check(value.ptr()))) {
      auto memory = borrow(value, false);
      writer_.add(name, kBytes, 0, nullptr, 0).values = writer_.place(memory->data, memory->nbytes);
      memories_.push_back(std::move(memory));
      return true;
    }
    return false;
  }

  // Fills `t` if the tensor's memory can be used as it stands. Complex tensors may be lazily conjugated, and the imaginary part
  // of one, which is contiguous if it is a single number, lazily negated: normalise resolves that.
  bool describe(const py::object& value, dl::Tensor& t, std::uint8_t& code, bool normalised) {
    if (exchange().tensor_from_object(value.ptr(), &t)) {
      PyErr_Clear();
      return false;
    }
    if (t.device.type != dl::kCpu || !is_contiguous(t) || static_cast<unsigned>(t.ndim) > kMaxDims) return false;
    code = dtype_code(t.dtype);
    if (!code) return false;
    if (!normalised && num_bytes(t) <= sizeof(double) && is_negated(value.ptr())) return false;
    alive_.push_back(value);
    return normalised || kDTypes[code].code != 5;
  }

  bool add_tensor(std::string_view name, const py::object& value, bool normalised) {
    dl::Tensor t;
    std::uint8_t code;
    if (!describe(value, t, code, normalised)) return false;
    Entry& e = writer_.add(name, kDense, code, t.shape, static_cast<unsigned>(t.ndim));
    e.values = writer_.place(address(t), num_bytes(t));
    return true;
  }

  bool add_ragged(std::string_view name, const py::object& value, bool normalised) {
    py::object inner = value;
    std::vector<py::object> offsets;  // innermost first
    while (PyTuple_Check(inner.ptr())) {
      if (PyTuple_GET_SIZE(inner.ptr()) != 2 || offsets.size() == kMaxLevels) return false;
      offsets.insert(offsets.begin(), py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(inner.ptr(), 1)));
      inner = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(inner.ptr(), 0));
    }
    dl::Tensor t, level[kMaxLevels];
    std::uint8_t code, level_code;
    if (!is_plain_tensor(inner.ptr()) || !describe(inner, t, code, normalised) || t.ndim == 0) return false;
    auto below = static_cast<std::uint64_t>(t.shape[0]);
    for (std::size_t i = 0; i < offsets.size(); ++i) {
      if (!is_plain_tensor(offsets[i].ptr()) || !describe(offsets[i], level[i], level_code, normalised)) return false;
      const dl::Tensor& o = level[i];
      if (o.ndim != 1 || o.dtype.code != 0 || o.dtype.bits < 32 ||
          !offsets_rise(address(o), o.dtype.bits == 32 ? 1 : 2, static_cast<std::size_t>(o.shape[0]), below))
        return false;
      below = static_cast<std::uint64_t>(o.shape[0] - 1);
    }
    Entry& e = writer_.add(name, kRagged, code, t.shape, static_cast<unsigned>(t.ndim));
    e.num_levels = static_cast<std::uint8_t>(offsets.size());
    e.values = writer_.place(address(t), num_bytes(t));
    for (std::size_t i = 0; i < offsets.size(); ++i) {
      e.level_dtype[i] = level[i].dtype.bits == 32 ? 1 : 2;
      e.levels[i] = writer_.place(address(level[i]), num_bytes(level[i]));
    }
    return true;
  }

  Writer writer_;
  py::function normalise_;
  std::vector<py::object> alive_;
  std::vector<std::shared_ptr<Memory>> memories_;
};

// A region of borrowed memory with the buffer protocol, so that Python can make a memoryview that keeps the owner alive.
struct Region {
  unsigned char* data;
  std::size_t nbytes;
  bool readonly;
  std::shared_ptr<void> owner;
};

py::object memory_view(Region region) {
  py::object object = py::cast(std::move(region));
  return py::reinterpret_steal<py::object>(PyMemoryView_FromObject(object.ptr()));
}

py::list buffers_of(const std::shared_ptr<Encoded>& encoded) {
  py::list out;
  for (const Writer::Region& r : encoded->writer().regions())
    out.append(memory_view({static_cast<unsigned char*>(const_cast<void*>(r.data)), r.nbytes, true, encoded}));
  return out;
}

void write_into(Encoded& encoded, const py::object& out, bool digest, int num_threads) {
  const auto memory = borrow(out, true);
  if (memory->nbytes < encoded.nbytes())
    raise("FrameError", "the frame has " + std::to_string(encoded.nbytes()) + " bytes and the buffer " + std::to_string(memory->nbytes) + ": give at least frame.nbytes");
  if (encoded.nbytes() < kReleaseGil) return encoded.write(memory->data, digest, num_threads);
  py::gil_scoped_release release;
  encoded.write(memory->data, digest, num_threads);
}

// A socket is written without blocking, whatever its mode, so that the deadline holds; a file does not block.
ssize_t write_some(int fd, bool is_socket, iovec* parts, std::size_t count) {
  if (!is_socket) return ::writev(fd, parts, static_cast<int>(count));
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  return ::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

// Gathers the frame into a file descriptor. Returns the bytes written: fewer than all of them only when the time is up.
std::uint64_t write_fd(const Encoded& encoded, int fd, double timeout_s) {
  using Clock = std::chrono::steady_clock;
  std::vector<iovec> parts = encoded.gather();
  py::gil_scoped_release release;
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
  struct stat info {};
  const bool is_socket = ::fstat(fd, &info) == 0 && S_ISSOCK(info.st_mode);
  std::uint64_t written = 0;
  std::size_t first = 0;
  while (first < parts.size()) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd waiting{fd, POLLOUT, 0};
    const int ready = ::poll(&waiting, 1, static_cast<int>(std::clamp<long long>(left, 0, INT_MAX)));
    if (ready == 0) return written;
    const ssize_t n = ready < 0 ? -1 : write_some(fd, is_socket, &parts[first], std::min<std::size_t>(parts.size() - first, IOV_MAX));
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) {
      py::gil_scoped_acquire gil;
      if (PyErr_CheckSignals()) throw py::error_already_set();
      continue;
    }
    if (n < 0) {
      py::gil_scoped_acquire gil;
      PyErr_SetFromErrno(PyExc_OSError);
      throw py::error_already_set();
    }
    written += static_cast<std::uint64_t>(n);
    for (auto rest = static_cast<std::size_t>(n); rest;) {
      iovec& part = parts[first];
      const std::size_t used = std::min(rest, part.iov_len);
      part.iov_base = static_cast<char*>(part.iov_base) + used;
      part.iov_len -= used;
      rest -= used;
      if (!part.iov_len) ++first;
    }
  }
  return written;
}

// A parsed frame. Values are made when they are asked for.
class Decoded {
 public:
  Decoded(const py::object& buffer, bool verify) : memory_(borrow(buffer, false)) {
    if (std::string error = reader_.parse(memory_->data, memory_->nbytes); !error.empty()) raise("FrameError", error);
    if (!verify) return;
    std::string error;
    {
      py::gil_scoped_release release;
      error = reader_.verify_payload();
    }
    if (!error.empty()) raise("FrameError", error);
  }

  const Reader& reader() const { return reader_; }

  py::list names() const {
    py::list out(reader_.size());
    for (std::size_t i = 0; i < reader_.size(); ++i) PyList_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(i), py::str(reader_.name(i)).release().ptr());
    return out;
  }

  bool contains(std::string_view name) const { return reader_.find(name) >= 0; }

  // Tensor or memoryview, or (values, inner offsets[, outer offsets]); KeyError for an unknown name.
  py::object get(std::string_view name) const {
    const std::ptrdiff_t i = reader_.find(name);
    if (i < 0) throw py::key_error(std::string(name));
    return value(static_cast<std::size_t>(i));
  }

  // All values by name, as `get` gives them.
  py::dict values() const {
    py::dict out;
    for (std::size_t i = 0; i < reader_.size(); ++i) {
      const std::string_view text = reader_.name(i);
      const auto name = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
      if (!name || PyDict_SetItem(out.ptr(), name.ptr(), value(i).ptr())) throw py::error_already_set();
    }
    return out;
  }

 private:
  py::object value(std::size_t i) const {
    const Entry& e = reader_.entry(i);
    unsigned char* data = memory_->data + e.values.offset;
    if (e.kind == kBytes) return memory_view({data, e.values.nbytes, memory_->readonly, memory_});
    static_assert(sizeof(std::int64_t) == sizeof(std::uint64_t));
    py::object values = make_tensor(data, e.dtype, reinterpret_cast<const std::int64_t*>(reader_.dims(i)), e.ndim, memory_, memory_->readonly);
    if (e.num_levels == 0) return values;
    py::tuple out(1 + e.num_levels);
    out[0] = std::move(values);
    for (unsigned level = 0; level < e.num_levels; ++level) {
      const Span& span = e.levels[level];
      const bool wide = e.level_dtype[level] == 2;
      const auto length = static_cast<std::int64_t>(span.nbytes / (wide ? 8 : 4));
      out[1 + level] = make_tensor(memory_->data + span.offset, wide ? 9 : 7, &length, 1, memory_, memory_->readonly);
    }
    return out;
  }

  std::shared_ptr<Memory> memory_;
  Reader reader_;
};

}  // namespace

void bind_frames(py::module_& m) {
  py::class_<Region>(m, "Region", py::buffer_protocol()).def_buffer([](Region& r) {
    return py::buffer_info(r.data, static_cast<py::ssize_t>(r.nbytes), r.readonly);
  });
  py::class_<Encoded, std::shared_ptr<Encoded>>(m, "EncodedFrame")
      .def(py::init<py::dict, py::function, std::uint64_t>())
      .def_property_readonly("nbytes", &Encoded::nbytes)
      .def_property_readonly("header", &Encoded::header)
      .def("buffers", &buffers_of)
      .def("checksum", &Encoded::checksum, py::call_guard<py::gil_scoped_release>())
      .def("write_into", &write_into)
      .def("write_fd", &write_fd);
  py::class_<Decoded>(m, "DecodedFrame")
      .def(py::init<py::object, bool>())
      .def("__len__", [](const Decoded& d) { return d.reader().size(); })
      .def("__contains__", &Decoded::contains)
      .def("names", &Decoded::names)
      .def("values", &Decoded::values)
      .def("get", &Decoded::get)
      .def_property_readonly("nbytes", [](const Decoded& d) { return d.reader().prefix().nbytes; })
      .def_property_readonly("tag", [](const Decoded& d) { return d.reader().prefix().tag; })
      .def_property_readonly("has_digest", [](const Decoded& d) { return (d.reader().prefix().flags & kHasPayloadDigest) != 0; });
  m.def("memory_view", [](const py::object& object) {
    const auto memory = borrow(object, false);
    return memory_view({memory->data, memory->nbytes, memory->readonly, memory});
  }, "A memoryview of bytes over a contiguous CPU tensor or a buffer.");
  m.attr("num_frame_dtypes") = kNumDTypes;
}

}  // namespace rl
