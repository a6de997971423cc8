// The controller's client for Python. A thread keeps the node registered; calls wait for answers without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "connector/python/src/python_error.h"
#include "connector/runtime/poll_loop.h"
#include "controller/api/client.h"
#include "transport/base/log.h"
#include "transport/base/wall_clock.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace kvferry;

// Longest time that the client's thread waits before it calls process() again, and lookup() before it checks again
// whether its answer has come.
constexpr int kTurnMs = 50;
constexpr const char* kTierNames[] = {"gpu", "host", "disk", "remote"};

// The fields of a holder: engine id, incarnation, endpoint, number of full chunks, tier, controller::Holder::confirmed.
using HolderTuple = std::tuple<std::string, std::uint64_t, std::string, std::uint32_t, std::string, bool>;

std::vector<ChunkKey> keys_from(const std::vector<nb::bytes>& keys) {
  std::vector<ChunkKey> result(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (keys[i].size() != sizeof(ChunkKey))
      throw PythonError(
          fmt::format("kvferry: a chunk key has {} bytes; it must have {}", keys[i].size(), sizeof(ChunkKey)));
    std::memcpy(result[i].bytes.data(), keys[i].c_str(), sizeof(ChunkKey));
  }
  return result;
}

/// The C++ part of kvferry.controller.Client. Every method may be called from any thread.
class PyClient {
 public:
  PyClient(const std::string& controller, std::string engine_id, std::string name_space, std::string fingerprint,
           std::string endpoint, std::uint64_t incarnation, const std::string& cluster_key_file) {
    controller::ClientOptions options;
    options.cluster_key = unwrap(net::read_cluster_key(cluster_key_file));
    options.controller = controller;
    options.wall_ms = wall_clock_ms;
    options.node = {EngineId{std::move(engine_id)}, Incarnation{incarnation}, "kv_both", std::move(endpoint),
                    std::move(name_space),          std::move(fingerprint)};
    client_ = unwrap(controller::make_client(options));
    loop_.start([this](std::vector<pollfd>& fds) { return turn(fds); });
  }
  ~PyClient() { close(); }

  void publish(const std::vector<nb::bytes>& keys) {
    const std::vector<ChunkKey> chunks = keys_from(keys);
    const nb::gil_scoped_release unlocked;
    const std::lock_guard lock(mutex_);
    check_open();
    std::vector<controller::ChunkEntry> entries;
    for (const ChunkKey& key : chunks) {
      entries.push_back({.key = key, .tail_group = {}});
      held_[key] = entries.back();
    }
    client_->publish(entries);
  }
  void evict(const std::vector<nb::bytes>& keys) {
    const std::vector<ChunkKey> chunks = keys_from(keys);
    const nb::gil_scoped_release unlocked;
    const std::lock_guard lock(mutex_);
    check_open();
    for (const ChunkKey& key : chunks) held_.erase(key);
    client_->evict(chunks);
  }

  /// Tries to send the lookup until that succeeds, and sends it again whenever the connection to the controller was
  /// lost.
  std::vector<HolderTuple> lookup(const std::vector<nb::bytes>& keys, double timeout_s) {
    const controller::LookupQuery query{.keys = keys_from(keys), .tail_groups = {}, .exact_tails = {}};
    const nb::gil_scoped_release unlocked;
    std::unique_lock lock(mutex_);
    const TimeNs deadline = clock_.now() + static_cast<TimeNs>(timeout_s * static_cast<double>(kSecond));
    std::uint64_t token = 0;
    std::uint64_t asked_in_life = 0;
    for (;;) {
      check_open();
      if (token == 0 || asked_in_life != num_lost_) {
        answers_.erase(token);
        const Result<std::uint64_t> asked = client_->lookup(query);
        if (!asked && asked.error().code == ErrorCode::kInvalidArgument) unwrap(Result<void>(asked.error()));
        token = asked ? *asked : 0;
        asked_in_life = num_lost_;
        if (asked) answers_[token] = {};
      }
      const auto answer = answers_.find(token);
      if (answer != answers_.end() && answer->second) {
        std::vector<HolderTuple> holders = std::move(*answer->second);
        answers_.erase(answer);
        return holders;
      }
      const TimeNs left = deadline - clock_.now();
      if (left <= 0) {
        answers_.erase(token);
        throw PythonError(
            fmt::format("kvferry: no answer from controller {} within {} s", client_->controller(), timeout_s));
      }
      changed_.wait_for(lock, std::chrono::nanoseconds(std::min(left, kTurnMs * kMillisecond)));
    }
  }

  bool wait_registered(double timeout_s) {
    const nb::gil_scoped_release unlocked;
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] {
      return is_closed_ || !refused_.empty() || client_->registered();
    }) && (check_open(), client_->registered());
  }
  std::string status() {
    const std::lock_guard lock(mutex_);
    if (is_closed_) return "closed";
    if (!refused_.empty()) return "refused: " + refused_;
    return client_->registered() ? "registered" : "connecting";
  }

  void close() {
    const nb::gil_scoped_release unlocked;
    {
      const std::lock_guard lock(mutex_);
      if (is_closed_) return;
      is_closed_ = true;
      changed_.notify_all();
    }
    loop_.stop();
    client_->leave();
    client_.reset();
  }

 private:
  int turn(std::vector<pollfd>& fds) {
    const std::lock_guard lock(mutex_);
    for (controller::ClientEvent& event : client_->process(clock_.now())) handle(event);
    fds.push_back({client_->fd(), POLLIN, 0});
    return kTurnMs;
  }

  void handle(controller::ClientEvent& event) {
    if (auto* reply = std::get_if<controller::LookupReply>(&event)) {
      const auto answer = answers_.find(reply->token);
      if (answer == answers_.end()) return;  // no caller waits for this answer any more
      answer->second.emplace();
      for (controller::Holder& holder : reply->holders) {
        answer->second->push_back({std::move(holder.engine_id.value), holder.incarnation.value,
                                   std::move(holder.endpoint), holder.num_full_chunks,
                                   kTierNames[static_cast<std::size_t>(holder.tier)], holder.confirmed});
      }
    } else if (auto* refused = std::get_if<controller::Refused>(&event)) {
      refused_ = std::move(refused->reason);
    } else if (std::holds_alternative<controller::Lost>(event)) {
      ++num_lost_;
    } else if (std::holds_alternative<controller::SnapshotWanted>(event)) {
      std::vector<controller::ChunkEntry> all;
      for (const auto& [key, entry] : held_) all.push_back(entry);
      client_->publish(all);
      client_->end_snapshot();
    }
    changed_.notify_all();
  }

  void check_open() const {
    if (is_closed_) throw PythonError("kvferry: this client of the controller is closed; make a new one");
    if (!refused_.empty()) throw PythonError("kvferry: the controller refused this node: " + refused_);
  }

  const SteadyClock clock_;
  std::unique_ptr<controller::Client> client_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_closed_ = false;
  std::string refused_;
  std::uint64_t num_lost_ = 0;
  std::unordered_map<ChunkKey, controller::ChunkEntry> held_;
  std::unordered_map<std::uint64_t, std::optional<std::vector<HolderTuple>>>
      answers_;  // [lookup's token] the answer that a caller waits for; empty until it arrives
  PollLoop loop_;
};

}  // namespace

void bind_controller(nb::module_& m) {
  nb::class_<PyClient>(m, "ControllerClient")
      .def(nb::init<const std::string&, std::string, std::string, std::string, std::string, std::uint64_t,
                    const std::string&>(),
           nb::kw_only(), "controller"_a, "engine_id"_a, "namespace"_a, "fingerprint"_a, "endpoint"_a, "incarnation"_a,
           "cluster_key_file"_a)
      .def("publish", &PyClient::publish, "keys"_a,
           "Reports that this node has these chunks. The report is sent later if no controller is reachable now.")
      .def("evict", &PyClient::evict, "keys"_a, "Reports that this node no longer has these chunks.")
      .def("lookup_holders", &PyClient::lookup, "keys"_a, "timeout"_a,
           "Same as kvferry.controller.Client.lookup(), but returns plain tuples.")
      .def("wait_registered", &PyClient::wait_registered, "timeout"_a = 5.0,
           "Returns False if no controller has accepted this node within `timeout` seconds.")
      .def("status", &PyClient::status, "Returns connecting, registered, closed, or \"refused: \" and the reason.")
      .def("close", &PyClient::close, "Unregisters this node. A second call does nothing.");
}
