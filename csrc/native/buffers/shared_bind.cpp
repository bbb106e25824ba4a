// Rings and arenas as Python sees them. Every wait naps without the GIL and comes back for signals.
#include <algorithm>
#include <system_error>

#include "buffers.h"
#include "exchange.h"
#include "rl_csrc/arena.h"
#include "rl_csrc/ring.h"

namespace py = pybind11;

namespace rl {
namespace {

Deadline after(double timeout_s) {
  using Clock = std::chrono::steady_clock;
  constexpr double kForever = 1e9;
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::clamp(timeout_s, 0.0, kForever)));
}

template <typename Step>
Wait wait(Step step) {
  for (;;) {
    Wait outcome;
    {
      py::gil_scoped_release release;
      outcome = step();
    }
    if (outcome != Wait::again) return outcome;
    if (PyErr_CheckSignals()) throw py::error_already_set();
  }
}

const char* name_of(Wait outcome) {
  switch (outcome) {
    case Wait::ready: return "ready";
    case Wait::late: return "late";
    case Wait::closed: return "closed";
    case Wait::died: return "died";
    default: return "again";
  }
}

py::tuple reader_tuple(const RingWriter& ring, int r) {
  static const char* const kStates[] = {"free", "expected", "joining", "attached", "evicted"};
  const ReaderLine& line = ring.header().readers[r];
  const auto state = static_cast<std::uint32_t>(line.state.load());
  return py::make_tuple(r, kStates[state < 5 ? state : 0], line.process.pid.load(), line.tail.load());
}

struct Pin {
  std::shared_ptr<ArenaMapping> arena;
  std::uint64_t block;
  ~Pin() { arena->unpin(block); }
};

py::object view_block(const std::shared_ptr<ArenaMapping>& arena, std::uint64_t block, std::uint64_t generation) {
  std::uint64_t nbytes = 0;
  unsigned char* data = arena->pin(block, generation, nbytes);
  if (!data) return py::none();
  return make_byte_tensor(data, nbytes, std::shared_ptr<Pin>(new Pin{arena, block}), false);
}

}  // namespace

void bind_shared(py::module_& m) {
  // OSError with its errno, so that Python picks FileNotFoundError, PermissionError and so on.
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const std::system_error& error) {
      const py::object args = py::make_tuple(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, args.ptr());
    }
  });

  py::class_<RingWriter>(m, "RingWriter")
      .def(py::init([](const std::string& name, std::uint32_t num_slots, std::uint64_t slot_nbytes, std::uint32_t num_readers, bool prefault) {
        py::gil_scoped_release release;
        return std::make_unique<RingWriter>(name.c_str(), RingGeometry{num_slots, slot_nbytes}, num_readers, prefault);
      }))
      .def("wait_slot", [](RingWriter& ring, double timeout_s) {
        const Deadline deadline = after(timeout_s);
        int culprit = -1;
        const Wait outcome = wait([&] { return ring.wait_slot(deadline, culprit); });
        return py::make_tuple(name_of(outcome), culprit);
      })
      .def("wait_drained", [](RingWriter& ring, double timeout_s) {
        const Deadline deadline = after(timeout_s);
        int culprit = -1;
        const Wait outcome = wait([&] { return ring.wait_drained(deadline, culprit); });
        return py::make_tuple(name_of(outcome), culprit);
      })
      .def("slot", [](const RingWriter& ring) { return make_byte_tensor(ring.slot(), ring.geometry().slot_nbytes, ring.memory(), false); })
      .def("publish", &RingWriter::publish)
      .def("reader", &reader_tuple)
      .def("evict", &RingWriter::evict)
      .def("close", &RingWriter::close)
      .def_property_readonly("head", &RingWriter::head)
      .def_property_readonly("fd", [](const RingWriter& ring) { return ring.memory()->fd(); })
      .def_property_readonly("nbytes", [](const RingWriter& ring) { return ring.memory()->nbytes(); });

  py::class_<RingReader>(m, "RingReader")
      .def(py::init<int, bool>(), py::call_guard<py::gil_scoped_release>())
      .def("next", [](RingReader& ring, double timeout_s) -> py::object {
        const Deadline deadline = after(timeout_s);
        Slot slot{};
        const Wait outcome = wait([&] { return ring.next(deadline, slot); });
        if (outcome != Wait::ready) return py::str(name_of(outcome));
        return py::make_tuple(make_byte_tensor(slot.data, slot.nbytes, ring.memory(), false), slot.sequence, slot.tag);
      })
      .def("release", &RingReader::release)
      .def("detach", &RingReader::detach)
      .def_property_readonly("index", &RingReader::index)
      .def_property_readonly("num_held", &RingReader::num_held)
      .def_property_readonly("is_evicted", [](const RingReader& ring) { return ring.index() >= 0 && ring.is_evicted(); })
      .def_property_readonly("writer_pid", [](const RingReader& ring) { return ring.header().writer.pid.load(); });
  m.attr("max_ring_readers") = kMaxReaders;

  py::class_<ArenaMapping, std::shared_ptr<ArenaMapping>>(m, "ArenaMapping")
      .def(py::init([](const std::string& name, std::uint64_t nbytes, std::uint64_t num_blocks, bool prefault) {
        py::gil_scoped_release release;
        return std::make_shared<ArenaMapping>(name.c_str(), nbytes, num_blocks, prefault);
      }))
      .def(py::init([](int fd, bool prefault) {
        py::gil_scoped_release release;
        return std::make_shared<ArenaMapping>(fd, prefault);
      }))
      .def("open", &ArenaMapping::open)
      .def("retire", &ArenaMapping::retire)
      .def("pins", &ArenaMapping::pins)
      .def("drop_dead_clients", &ArenaMapping::drop_dead_clients)
      .def("view", &view_block)
      .def("discard", [](const ArenaMapping& arena, std::size_t offset, std::size_t nbytes) { arena.memory()->discard(arena.data_offset() + offset, nbytes); })
      .def_property_readonly("num_blocks", &ArenaMapping::num_blocks)
      .def_property_readonly("nbytes", &ArenaMapping::data_nbytes)
      .def_property_readonly("fd", [](const ArenaMapping& arena) { return arena.memory()->fd(); });
}

}  // namespace rl
