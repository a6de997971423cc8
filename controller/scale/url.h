// Where etcd and the event log are: what --etcd and --event-log take.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "transport/base/result.h"

namespace kvferry::controller::scale {

/// Never printed with its password.
struct ServiceUrl {
  std::string host;
  int port = 0;
  std::string user;
  std::string password;

  std::string host_port() const;  // [HOST]:PORT where HOST has colons
};

/// http://[USER:PASSWORD@]HOST:PORT[,...][/PREFIX]: the members of one etcd, and the prefix of all keys there.
struct EtcdUrl {
  std::vector<ServiceUrl> members;
  std::string prefix = "kvferry";
};
/// kInvalidArgument: one sentence without the password.
Result<EtcdUrl> parse_etcd_url(std::string_view text);

/// redis://[USER:PASSWORD@]HOST[:PORT][/DB][?stream=NAME&bytes=N].
struct RedisUrl {
  ServiceUrl server;
  int database = 0;
  std::string stream = "kvferry:events";
  std::size_t bytes_max = std::size_t{256} << 20;  // of the stream in Redis's memory, about
};
Result<RedisUrl> parse_redis_url(std::string_view text);

}  // namespace kvferry::controller::scale
