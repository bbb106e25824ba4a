// The pipeline and the stream writer for Python: addresses are borrowed here, under Python's lock, and checked.
#include "rl_csrc/pipeline.h"

#include <sys/socket.h>

#include "buffers.h"
#include "exchange.h"

namespace py = pybind11;

namespace rl {
namespace {

using Owners = std::vector<std::shared_ptr<Memory>>;

const std::shared_ptr<Memory>& within(const std::shared_ptr<Memory>& memory, std::uint64_t start, std::uint64_t nbytes, const char* what) {
  if (start > memory->nbytes || nbytes > memory->nbytes - start)
    raise("ArgumentError", std::string("a piece of ") + std::to_string(nbytes) + " bytes at " + std::to_string(start) + " does not fit " + what + " of " +
                               std::to_string(memory->nbytes) + " bytes");
  return memory;
}

class Buckets {
 public:
  Buckets(const py::list& slots, std::uint64_t leaf_nbytes, int waker) : slots_(borrowed(slots)), pipeline_(ranges(slots_), checked(leaf_nbytes), waker) {}

  std::uint64_t pack(std::uint64_t bucket, py::handle content, std::uint64_t offset, std::uint64_t slot_offset, std::uint64_t nbytes, bool is_copied,
                     bool is_digested) {
    const auto memory = within(borrow(content, false), offset, nbytes, "its content");
    for (const auto& slot : slots_) {
      if (!slot) raise("ArgumentError", "the slots of this pipeline are on a device: only assign() them");
      within(slot, slot_offset, nbytes, "a slot");
    }
    Job job;
    job.bucket = static_cast<std::int64_t>(bucket);
    job.pieces.push_back({nullptr, memory->data + offset, slot_offset, nbytes, is_copied, is_digested});
    job.owner = memory;
    return pipeline_.put(std::move(job));
  }

  // Pieces are (content or None, offset in it, offset in the slot, bytes), in the order of the slot, all of them digested. From
  // a stream they are read into their contents, and what has none into the slot; else copied out of the slot.
  std::uint64_t unpack(py::handle slot, int stream, std::uint64_t used_nbytes, const py::list& pieces) {
    const auto ring = within(borrow(slot, true), 0, used_nbytes, "the slot");
    auto owners = std::make_shared<Owners>(Owners{ring});
    Job job;
    job.stream = stream;
    std::uint64_t end = 0, in_slot = 0;
    for (const py::handle item : pieces) {
      const auto f = py::reinterpret_borrow<py::tuple>(item);
      const auto offset = f[1].cast<std::uint64_t>(), at = f[2].cast<std::uint64_t>(), nbytes = f[3].cast<std::uint64_t>();
      if (at < end || at > used_nbytes || nbytes > used_nbytes - at) raise("ArgumentError", "the pieces of a bucket must follow one another inside it");
      end = at + nbytes;
      unsigned char* const inside = ring->data + at;
      if (f[0].is_none()) {
        job.pieces.push_back({nullptr, inside, 0, nbytes, false, true});
        continue;
      }
      owners->push_back(within(borrow(f[0], true), offset, nbytes, "its content"));
      unsigned char* const outside = owners->back()->data + offset;
      if (stream < 0) {
        job.pieces.push_back({outside, inside, 0, nbytes, true, true});
        continue;
      }
      if (at > in_slot) job.reads.push_back({ring->data + in_slot, at - in_slot});
      if (nbytes) job.reads.push_back({outside, nbytes});
      job.pieces.push_back({nullptr, outside, 0, nbytes, false, true});
      in_slot = end;
    }
    if (stream >= 0 && used_nbytes > in_slot) job.reads.push_back({ring->data + in_slot, used_nbytes - in_slot});
    job.owner = owners;
    return pipeline_.put(std::move(job));
  }

  // Of the next jobs: (errno, -1 at the end of a stream, or 0; the leaf digests of each piece).
  py::list take(std::uint64_t count) {
    py::list taken;
    for (const Result& result : pipeline_.take(count)) {
      py::list pieces;
      for (const auto& leaves : result.leaves) {
        py::list digests;
        for (const std::uint64_t leaf : leaves) digests.append(leaf);
        pieces.append(digests);
      }
      taken.append(py::make_tuple(result.error, pieces));
    }
    return taken;
  }

  Pipeline& pipeline() { return pipeline_; }

 private:
  static Owners borrowed(const py::list& slots) {
    Owners owners;
    for (const py::handle slot : slots) owners.push_back(slot.is_none() ? nullptr : borrow(slot, true));
    return owners;
  }
  static std::vector<Range> ranges(const Owners& slots) {
    std::vector<Range> found;
    for (const auto& slot : slots) found.push_back(slot ? Range{slot->data, slot->nbytes} : Range{nullptr, 0});
    return found;
  }
  static std::uint64_t checked(std::uint64_t leaf_nbytes) {
    if (leaf_nbytes == 0 || leaf_nbytes % 8) raise("ArgumentError", "leaves have " + std::to_string(leaf_nbytes) + " bytes; it must be a multiple of 8, and not 0");
    return leaf_nbytes;
  }

  Owners slots_;
  Pipeline pipeline_;
};

template <class Result, class... Arguments>
auto of(Result (Pipeline::*method)(Arguments...)) {
  return [method](Buckets& buckets, Arguments... arguments) { return (buckets.pipeline().*method)(arguments...); };
}
template <class Result, class... Arguments>
auto of(Result (Pipeline::*method)(Arguments...) const) {
  return [method](Buckets& buckets, Arguments... arguments) { return (buckets.pipeline().*method)(arguments...); };
}

// Runs are (tensor, start, bytes), or (descriptor of a file, start, bytes). Their memory must stay until the kernel has it.
void put_runs(StreamWriter& writer, const py::list& runs) {
  std::vector<Run> found;
  for (const py::handle item : runs) {
    const auto f = py::reinterpret_borrow<py::tuple>(item);
    const auto start = f[1].cast<std::uint64_t>(), nbytes = f[2].cast<std::uint64_t>();
    if (py::isinstance<py::int_>(f[0]))
      found.push_back({nullptr, nbytes, f[0].cast<int>(), static_cast<std::int64_t>(start)});
    else
      found.push_back({within(borrow(f[0], false), start, nbytes, "its memory")->data + start, nbytes, -1, 0});
  }
  writer.put(std::move(found));
}

// A thread that asks for Python's lock again waits for up to 5 ms where another computes: what does not wait keeps it.
std::size_t send_now(int socket, py::handle data) {
  const auto memory = borrow(data, false);
  const ssize_t sent = ::send(socket, memory->data, memory->nbytes, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent >= 0) return static_cast<std::size_t>(sent);
  PyErr_SetFromErrno(PyExc_OSError);
  throw py::error_already_set();
}

py::bytes receive_now(int socket) {
  char room[1 << 16];
  const ssize_t found = ::recv(socket, room, sizeof(room), MSG_DONTWAIT);
  if (found >= 0) return py::bytes(room, static_cast<std::size_t>(found));
  PyErr_SetFromErrno(PyExc_OSError);
  throw py::error_already_set();
}

}  // namespace

void bind_pipeline(py::module_& m) {
  m.def("send_now", &send_now);
  m.def("receive_now", &receive_now);
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<Buckets>(m, "Pipeline")
      .def(py::init<const py::list&, std::uint64_t, int>(), py::arg("slots"), py::arg("leaf_nbytes"), py::arg("waker"))
      .def("pack", &Buckets::pack)
      .def("unpack", &Buckets::unpack)
      .def("take", &Buckets::take)
      .def("start", of(&Pipeline::start))
      .def("help", of(&Pipeline::help), Unlocked())
      .def("num_done", of(&Pipeline::num_done))
      .def("num_bytes", of(&Pipeline::num_bytes))
      .def("busy_ns", of(&Pipeline::busy_ns))
      .def("wake_at", of(&Pipeline::wake_at))
      .def("is_stalled", of(&Pipeline::is_stalled))
      .def("slot_of", of(&Pipeline::slot_of))
      .def("assign", of(&Pipeline::assign))
      .def("release", of(&Pipeline::release))
      .def("use_slots", of(&Pipeline::use_slots))
      .def("cancel", of(&Pipeline::cancel), Unlocked())
      .def("close", of(&Pipeline::close), Unlocked());
  py::class_<StreamWriter>(m, "StreamWriter")
      .def(py::init([](int socket, int waker, Buckets* ahead) {
             return std::make_unique<StreamWriter>(socket, waker, ahead ? ahead->pipeline().backlog() : nullptr);
           }),
           py::arg("socket"), py::arg("waker"), py::arg("ahead") = nullptr)
      .def("put", &put_runs)
      .def("is_idle", &StreamWriter::is_idle)
      .def("wake_when_idle", &StreamWriter::wake_when_idle)
      .def("error", &StreamWriter::error)
      .def("system_ns", &StreamWriter::system_ns)
      .def("thread_ns", &StreamWriter::thread_ns)
      .def("close", &StreamWriter::close, Unlocked());
}

}  // namespace rl
