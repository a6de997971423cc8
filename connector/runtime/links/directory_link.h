// The scheduler node's link to the controller: carries the core's actions to the controller, and the controller's
// answers and orders to the core. A part of NodeLinks; runs on the thread of NodeLinks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "connector/runtime/links/link_parts.h"
#include "connector/runtime/links/node_activity.h"
#include "controller/api/client.h"

namespace kvferry {

/// Not thread-safe: only the thread of NodeLinks uses it.
class DirectoryLink {
 public:
  DirectoryLink(const LinkParts& parts, std::unique_ptr<controller::Client> directory)
      : parts_(parts), directory_(std::move(directory)) {}

  int fd() const { return directory_->fd(); }
  void set_load(std::size_t num_requests) { directory_->set_load(num_requests); }
  /// Hands the controller's client a new report of this node's pool and transfers, which the next heartbeat carries.
  void report();

  void execute(QueryDirectory& query);
  void execute(PublishChunks& published);
  void execute(AnnounceEvictions& evicted) { directory_->evict(evicted.keys); }

  void take_events();
  /// Deregisters from the controller. A second call does nothing; no other method may be called afterwards.
  void leave();

 private:
  void take(controller::ClientEvent& event);
  void take_answer(controller::LookupReply& reply);
  void publish_snapshot();
  void set_up(bool is_up);

  const LinkParts& parts_;
  std::unique_ptr<controller::Client> directory_;
  NodeActivity activity_;
  std::map<std::uint64_t, std::uint64_t> fetch_of_lookup_;  // [token of the lookup] id of the fetch
};

}  // namespace kvferry
