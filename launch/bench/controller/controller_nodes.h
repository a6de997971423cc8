// The nodes, chunks and queries that the parts of `kvferry bench controller` share.
#pragma once

#include <vector>

#include "controller/api/client.h"
#include "controller/directory/directory.h"
#include "launch/bench/harness/controller_load.h"
#include "launch/bench/harness/failure.h"

namespace kvferry::bench {

constexpr std::uint64_t kLookupKeys = 128;

inline Failure wrong_answer() {
  return Failure(
      {ErrorCode::kCorrupt, "the controller gave a wrong answer to a lookup, so the benchmark ends without figures"});
}
inline Failure no_answer() {
  return Failure({ErrorCode::kUnavailable,
                  "the controller that the benchmark started, or its echo server, does not answer; it may have ended, "
                  "or this machine may be too busy"});
}

inline controller::NodeInfo node_info(const std::string& name) {
  return {EngineId{name}, Incarnation{1}, "kv_both", "tcp://10.0.0.1:1", "", "model"};
}
inline controller::NodeInfo worker_info(std::uint32_t worker) { return node_info(fmt::format("worker{}", worker)); }

inline void fill_chunks(std::uint64_t prefix, std::uint64_t position, std::vector<controller::ChunkEntry>& chunks) {
  std::vector<ChunkKey> keys(chunks.size());
  fill_keys<ChunkKey>(prefix, position, keys);
  for (std::size_t i = 0; i < keys.size(); ++i) chunks[i].key = keys[i];
}

inline controller::LookupQuery query_of(std::uint64_t prefix, std::uint64_t position = 0) {
  controller::LookupQuery query{.keys = std::vector<ChunkKey>(kLookupKeys), .tail_groups = {}, .exact_tails = {}};
  fill_keys<ChunkKey>(prefix, position, query.keys);
  return query;
}

/// Checks the answer to a lookup of kLookupKeys keys of the prefix. Returns true if `holders` names as many workers as
/// hold the prefix, each with all of the keys. `Holders` is the client's, the directory's or the wire protocol's type.
template <class Holders>
bool names_all_workers(const Holders& holders, std::uint64_t prefix) {
  if (holders.size() != (has_second_worker(prefix) ? 2U : 1U)) return false;
  for (const auto& holder : holders) {
    if (holder.num_full_chunks != kLookupKeys) return false;
  }
  return true;
}

constexpr int kPatienceMs = 10'000;  // longest wait for an answer of the controller in the other process

/// Returns a client that the controller has registered under this name. Failures: those of make_client() and
/// wait_registered().
inline std::unique_ptr<controller::Client> registered(const std::string& controller, const std::string& name) {
  auto client = need(controller::make_client({.controller = controller, .node = node_info(name)}));
  need(controller::wait_registered(*client, SteadyClock(), kPatienceMs));
  return client;
}

/// Workers that have joined a directory in this process and publish into it.
class DirectoryWorkers {
 public:
  /// All workers join with an empty snapshot. Their leases begin at `now`.
  DirectoryWorkers(controller::Directory& directory, TimeNs now) : directory_(directory) {
    for (std::uint32_t i = 0; i < kNumWorkers; ++i) ids_.push_back(join(worker_info(i), now));
  }
  controller::NodeId join(const controller::NodeInfo& info, TimeNs now) {
    const controller::NodeId id = directory_.join(info, 0, now).value().id;
    directory_.publish(id, 0, controller::SnapshotMark::kReplaces, {}, now);
    return id;
  }
  void publish(std::uint32_t worker, const std::vector<controller::ChunkEntry>& chunks, TimeNs now) {
    const controller::NodeId id = ids_[worker];
    directory_.publish(id, directory_.repair(id).resend_from, controller::SnapshotMark::kNone, chunks, now);
  }
  void evict(std::uint32_t worker, const std::vector<ChunkKey>& keys, TimeNs now) {
    const controller::NodeId id = ids_[worker];
    directory_.evict(id, directory_.repair(id).resend_from, keys, now);
  }

 private:
  controller::Directory& directory_;
  std::vector<controller::NodeId> ids_;
};

}  // namespace kvferry::bench
