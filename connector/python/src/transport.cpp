// The transport for Python: registers buffers, submits transfers, waits for completions without the interpreter's lock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "connector/python/src/python_bytes.h"
#include "connector/python/src/python_error.h"
#include "kernels/stream_packer.h"
#include "transport/base/clock.h"
#include "transport/make_transport.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace kvferry;

constexpr TimeNs kTurn = 100 * kMillisecond;  // longest wait between two checks for signals
constexpr double kTimeoutMaxS = 1e9;

std::string to_string(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

class PyTransport;
struct PyRegion {
  const PyTransport* owner;
  RegionId id;
  std::uint64_t size;
  std::string exported;
};
using Event = std::variant<Completion, Notification>;

/// The class kvferry.transport.Transport. Every method may be called from any thread. Members other than transport_ are
/// guarded by the interpreter's lock.
class PyTransport {
 public:
  PyTransport(std::string_view path, std::string listen_host, std::optional<int> gpu) {
    const nb::gil_scoped_release unlocked;
    TransportOptions options;
    options.path = unwrap(parse_path(path));
    options.tcp.listen_host = std::move(listen_host);
    if (gpu) gpu_ = unwrap(open_gpu(*gpu)).device;
    options.device = gpu_.get();
    transport_ = unwrap(make_transport(options));
  }
  ~PyTransport() { close(); }

  nb::bytes address() const { return to_bytes(transport_->address()); }
  std::string describe() const { return transport_->describe(); }

  PyRegion register_buffer(const nb::object& buffer) {
    auto view = std::make_unique<Py_buffer>();
    if (PyObject_GetBuffer(buffer.ptr(), view.get(), PyBUF_WRITABLE) != 0) throw nb::python_error();
    BufferView held(view.release());
    PyRegion region = register_region({held->buf, static_cast<std::uint64_t>(held->len)});
    if (is_closed_) throw PythonError("kvferry: this transport is closed; make a new one");
    buffers_.emplace(region.id, std::move(held));
    return region;
  }
  PyRegion register_memory(std::uintptr_t address, std::uint64_t size, bool gpu) {
    if (gpu && !gpu_) throw PythonError("kvferry: GPU memory needs a transport that was made with gpu=NUMBER");
    return register_region(
        {.base = reinterpret_cast<void*>(address), .bytes = size, .device = gpu ? gpu_.get() : nullptr});
  }
  void unregister(const PyRegion& region) {
    check_owner(region);
    {
      const nb::gil_scoped_release unlocked;
      unwrap(transport_->unregister_region(region.id));
    }
    buffers_.erase(region.id);
  }

  std::uint32_t connect(const nb::bytes& address) {
    const std::string peer = to_string(address);
    const nb::gil_scoped_release unlocked;
    return unwrap(transport_->connect(peer)).value;
  }
  void disconnect(std::uint32_t peer) {
    const nb::gil_scoped_release unlocked;
    transport_->disconnect(PeerId{peer});
  }

  std::uint64_t submit(std::uint32_t peer, Direction direction, const PyRegion& region, const nb::bytes& remote,
                       const std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>& ranges,
                       const nb::bytes& notification) {
    check_owner(region);
    PagedTransfer transfer{PeerId{peer}, direction, region.id, to_string(remote), {}, to_string(notification)};
    for (const auto& [local, other, size] : ranges) transfer.ranges.push_back({local, other, size});
    const nb::gil_scoped_release unlocked;
    return unwrap(transport_->submit(std::move(transfer))).value;
  }
  void cancel(std::uint64_t transfer) {
    const nb::gil_scoped_release unlocked;
    transport_->cancel(TransferId{transfer});
  }

  std::vector<Event> poll() {
    std::vector<Event> events;
    for (Completion& completion : transport_->poll()) events.emplace_back(std::move(completion));
    for (Notification& note : transport_->poll_notifications()) events.emplace_back(std::move(note));
    return events;
  }
  std::vector<Event> wait(double timeout_s) {
    const SteadyClock clock;
    const TimeNs deadline =
        clock.now() + static_cast<TimeNs>(std::clamp(timeout_s, 0.0, kTimeoutMaxS) * static_cast<double>(kSecond));
    for (;;) {
      std::vector<Event> events = poll();
      const TimeNs left = deadline - clock.now();
      if (!events.empty() || left <= 0 || is_closed_) return events;
      {
        const nb::gil_scoped_release unlocked;
        transport_->wait(std::min(left, kTurn));
      }
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
  }

  void close() {
    if (std::exchange(is_closed_, true) || !transport_) return;
    {
      const nb::gil_scoped_release unlocked;
      transport_->shutdown();
    }
    buffers_.clear();
  }

 private:
  struct Release {
    void operator()(Py_buffer* view) const {
      PyBuffer_Release(view);
      delete view;
    }
  };
  using BufferView = std::unique_ptr<Py_buffer, Release>;

  PyRegion register_region(const MemoryRegion& memory) {
    const nb::gil_scoped_release unlocked;
    const RegionId id = unwrap(transport_->register_region(memory));
    return {this, id, memory.bytes, unwrap(transport_->export_region(id))};
  }
  void check_owner(const PyRegion& region) const {
    if (region.owner != this)
      throw PythonError("kvferry: the region is registered with another transport; register its memory with this one");
  }

  std::shared_ptr<Device> gpu_;
  std::unique_ptr<Transport> transport_;
  std::map<RegionId, BufferView> buffers_;  // the views keep registered buffers from being freed or resized
  bool is_closed_ = false;
};

}  // namespace

void bind_transport(nb::module_& m) {
  nb::enum_<Direction>(m, "Direction")
      .value("PULL", Direction::kPull, "Copies from the peer's memory to this process's.")
      .value("PUSH", Direction::kPush, "Copies from this process's memory to the peer's.");
  nb::class_<PyRegion>(m, "Region", "Registered memory.")
      .def_ro("size", &PyRegion::size, "Size in bytes.")
      .def_prop_ro(
          "exported", [](const PyRegion& self) { return to_bytes(self.exported); },
          "Opaque bytes with which peers name this region in submit().");
  nb::class_<Completion>(m, "Completion", "The outcome of one transfer, whose memory is no longer touched.")
      .def_prop_ro(
          "transfer", [](const Completion& self) { return self.id.value; }, "The number that submit() returned.")
      .def_prop_ro(
          "ok", [](const Completion& self) { return self.code == ErrorCode::kOk; }, "True if all bytes were moved.")
      .def_prop_ro(
          "code", [](const Completion& self) { return name_of(self.code); }, "The kind of failure, or ok.")
      .def_ro("what", &Completion::what, "A sentence that explains a failure; empty if ok.");
  nb::class_<Notification>(m, "Notification", "Reports that a peer's transfer has ended and its bytes are visible.")
      .def_prop_ro(
          "sender", [](const Notification& self) { return to_bytes(self.from); }, "The peer's address().")
      .def_prop_ro(
          "body", [](const Notification& self) { return to_bytes(self.body); }, "The notification given to submit().");
  nb::class_<PyTransport>(m, "Transport",
                          "Moves byte ranges between registered memory of two processes. Every method may be called "
                          "from any thread. Errors raise KvFerryError with one sentence.")
      .def(nb::init<std::string_view, std::string, std::optional<int>>(), nb::kw_only(), "path"_a = "auto",
           "listen_host"_a = "", "gpu"_a = nb::none(),
           "path: a value of the connector's setting `path`. listen_host: host name or address at which peers connect; "
           "empty: every interface. gpu: number of the GPU whose memory can be registered as well.")
      .def("address", &PyTransport::address, "Returns opaque bytes with which a peer connects to this transport.")
      .def("describe", &PyTransport::describe, "Returns a sentence that names the path and library in use.")
      .def("register", &PyTransport::register_buffer, "buffer"_a,
           "Registers a writable buffer (bytearray, mmap, numpy array, ...), which stays alive until unregister() or "
           "close().")
      .def("register_memory", &PyTransport::register_memory, "address"_a, "size"_a, nb::kw_only(), "gpu"_a = false,
           "Registers memory by its address, for example tensor.data_ptr(). The caller must not free it before "
           "unregister() or close().")
      .def("unregister", &PyTransport::unregister, "region"_a,
           "Raises KvFerryError if a transfer still uses the region; the caller can try again later.")
      .def("connect", &PyTransport::connect, "address"_a,
           "Returns the peer's number. The connection is made by the first transfer.")
      .def("disconnect", &PyTransport::disconnect, "peer"_a)
      .def("submit", &PyTransport::submit, "peer"_a, "direction"_a, "region"_a, "remote"_a, "ranges"_a, nb::kw_only(),
           "notification"_a = nb::bytes("", 0),
           "Starts a transfer between `region` and the peer's region whose `exported` is `remote`. A range is "
           "(local offset, remote offset, bytes). Returns the transfer's number; exactly one Completion follows. The "
           "peer receives a non-empty notification after the last byte.")
      .def("cancel", &PyTransport::cancel, "transfer"_a,
           "Asks for the end of a transfer. Its Completion still follows.")
      .def("poll", &PyTransport::poll, "Returns completions and notifications since the last call.")
      .def("wait", &PyTransport::wait, "timeout"_a,
           "Same as poll(), but waits until there is something to return or `timeout` seconds have passed.")
      .def("close", &PyTransport::close,
           "Ends all transfers and releases the registered buffers. A second call does nothing.")
      .def(
          "__enter__", [](nb::handle_t<PyTransport> self) { return nb::borrow(self); },
          nb::sig("def __enter__(self) -> Transport"))
      .def(
          "__exit__", [](PyTransport& self, const nb::args&) { self.close(); },
          nb::sig("def __exit__(self, *args: object) -> None"));
  m.def("gpu_support", &gpu_support,
        "Returns the GPU architectures that this build has kernels for, and the version of its CUDA runtime.");
}
