// The addresses of etcd and of the event log: the values of --etcd and --event-log.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "transport/base/net/host_port.h"
#include "transport/base/result.h"

namespace kvferry::controller::scale {

/// Address and login of a server. Only host_port() may be printed, because the password must not appear in logs.
struct ServiceUrl {
  net::HostPort address;
  std::string user;
  std::string password;

  std::string host_port() const { return net::to_text(address); }
};

/// A URL of the form http://[USER:PASSWORD@]HOST:PORT[,...][/PREFIX]: the members of an etcd cluster, and the prefix of
/// all keys.
struct EtcdUrl {
  std::vector<ServiceUrl> members;
  std::string prefix = "kvferry";
};
/// Parses a URL of etcd. kInvalidArgument: `text` is malformed; the message does not contain the password.
Result<EtcdUrl> parse_etcd_url(std::string_view text);

/// A URL of the form redis://[USER:PASSWORD@]HOST[:PORT][/DB][?stream=NAME&bytes=N].
struct RedisUrl {
  ServiceUrl server;
  int database = 0;
  std::string stream = "kvferry:events";
  std::size_t bytes_max = std::size_t{256} << 20;  // approximate limit of the stream's memory in Redis
};
Result<RedisUrl> parse_redis_url(std::string_view text);

}  // namespace kvferry::controller::scale
