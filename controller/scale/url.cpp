#include "controller/scale/url.h"

#include <algorithm>
#include <charconv>
#include <optional>

namespace kvferry::controller::scale {
namespace {

constexpr std::string_view kEtcdAllowed =
    "http://HOST:PORT[,HOST:PORT...][/PREFIX], e.g. "
    "http://10.0.0.1:2379,http://10.0.0.2:2379/kvferry; USER:PASSWORD@ may precede HOST";
constexpr std::string_view kRedisAllowed =
    "redis://HOST[:PORT][/DB][?stream=NAME&bytes=N] with N of at least 1048576, e.g. redis://10.0.0.1:6379; "
    "USER:PASSWORD@ may precede HOST";

Error bad(std::string_view what, std::string_view allowed) {
  return {ErrorCode::kInvalidArgument, fmt::format("{}; allowed: {}", what, allowed)};
}

template <class Number>
std::optional<Number> number_of(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return number;
}

/// Decodes escapes such as %40, which passwords may need.
std::optional<std::string> percent_decoded(std::string_view text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    unsigned code = static_cast<unsigned char>(text[i]);
    if (text[i] == '%') {
      if (i + 2 >= text.size()) return std::nullopt;
      const auto [end, error] = std::from_chars(text.data() + i + 1, text.data() + i + 3, code, 16);
      if (error != std::errc{} || end != text.data() + i + 3) return std::nullopt;
      i += 2;
    }
    if (code < 0x20 || code == 0x7f) return std::nullopt;
    plain += static_cast<char>(code);
  }
  return plain;
}

/// Parses [USER[:PASSWORD]@]HOST[:PORT]. PORT may be missing only if there is a default.
std::optional<ServiceUrl> authority(std::string_view text, std::optional<std::uint16_t> default_port) {
  ServiceUrl url;
  if (const std::size_t at = text.rfind('@'); at != std::string_view::npos) {
    const std::string_view login = text.substr(0, at);
    const std::size_t colon = login.find(':');
    const auto user = percent_decoded(login.substr(0, colon));
    const auto password = percent_decoded(colon == std::string_view::npos ? "" : login.substr(colon + 1));
    if (!user || !password) return std::nullopt;
    url.user = *user;
    url.password = *password;
    text.remove_prefix(at + 1);
  }
  Result<net::HostPort> address = net::parse_host_port(text, default_port);
  if (!address || address->port == 0 || address->host.find('%') != std::string::npos) return std::nullopt;
  url.address = std::move(*address);
  return url;
}

bool is_name(std::string_view text) {
  const auto fits = [](char c) { return c > ' ' && c < 0x7f; };
  return !text.empty() && text.size() <= 256 && std::all_of(text.begin(), text.end(), fits);
}

}  // namespace

Result<EtcdUrl> parse_etcd_url(std::string_view text) {
  constexpr std::string_view kHttp = "http://";
  if (text.starts_with("https://")) {
    return bad("TLS to etcd (https) is not supported; use a local proxy, e.g. etcd's own grpc-proxy", kEtcdAllowed);
  }
  EtcdUrl url;
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t comma = rest.find(',');
    std::string_view one = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
    // http:// is optional for all members but the first.
    if (one.starts_with(kHttp)) {
      one.remove_prefix(kHttp.size());
    } else if (url.members.empty()) {
      return bad("the list of etcd's members does not begin with http://", kEtcdAllowed);
    }
    if (const std::size_t slash = one.find('/'); slash != std::string_view::npos) {
      if (!rest.empty()) return bad("etcd's /PREFIX must come after the last HOST:PORT of the list", kEtcdAllowed);
      if (one.size() > slash + 1) url.prefix = one.substr(slash + 1);
      while (url.prefix.ends_with('/')) url.prefix.pop_back();
      one = one.substr(0, slash);
    }
    std::optional<ServiceUrl> member = authority(one, std::nullopt);
    if (!member)
      return bad(
          fmt::format(
              "member {} of the list is not HOST:PORT, with a port of 1 to 65535, after an optional USER:PASSWORD@",
              url.members.size() + 1),
          kEtcdAllowed);
    url.members.push_back(std::move(*member));
  }
  if (url.members.empty()) return bad("the list of etcd's members is empty", kEtcdAllowed);
  if (!is_name(url.prefix))
    return bad("etcd's PREFIX must have 1 to 256 printable ASCII characters without spaces", kEtcdAllowed);
  return url;
}

Result<RedisUrl> parse_redis_url(std::string_view text) {
  constexpr std::string_view kRedis = "redis://";
  constexpr std::uint16_t kRedisPort = 6379;
  if (text.starts_with("rediss://"))
    return bad("TLS to Redis (rediss) is not supported; use a local proxy, e.g. stunnel", kRedisAllowed);
  if (!text.starts_with(kRedis)) return bad("the event log's address does not begin with redis://", kRedisAllowed);
  text.remove_prefix(kRedis.size());
  RedisUrl url;
  if (const std::size_t query = text.find('?'); query != std::string_view::npos) {
    for (std::string_view rest = text.substr(query + 1); !rest.empty();) {
      const std::size_t end = rest.find('&');
      const std::string_view option = rest.substr(0, end);
      rest = end == std::string_view::npos ? std::string_view{} : rest.substr(end + 1);
      if (option.starts_with("stream=") && is_name(option.substr(7))) {
        url.stream = option.substr(7);
      } else if (const auto bytes = number_of<std::size_t>(option.starts_with("bytes=") ? option.substr(6) : "");
                 bytes && *bytes >= std::size_t{1} << 20) {
        url.bytes_max = *bytes;
      } else {
        return bad(
            "an option after '?' is neither stream=NAME, with 1 to 256 printable ASCII characters without spaces, nor "
            "bytes=N",
            kRedisAllowed);
      }
    }
    text = text.substr(0, query);
  }
  if (const std::size_t slash = text.rfind('/'); slash != std::string_view::npos) {
    const auto database = number_of<int>(text.substr(slash + 1));
    if (text.size() > slash + 1 && (!database || *database < 0 || *database > 65'535))
      return bad("the event log's DB is not a number from 0 to 65535", kRedisAllowed);
    url.database = database.value_or(0);
    text = text.substr(0, slash);
  }
  std::optional<ServiceUrl> server = authority(text, kRedisPort);
  if (!server) return bad("the event log's USER, PASSWORD, HOST or PORT is malformed", kRedisAllowed);
  url.server = std::move(*server);
  return url;
}

}  // namespace kvferry::controller::scale
