#include "launch/bench/transfer/far_side.h"

#include "launch/bench/harness/host_facts.h"
#include "launch/bench/transfer/worker_command.h"

namespace kvferry::bench {

using Json = nlohmann::json;

Result<void> FarSide::open(const std::optional<HostPort>& address) {
  HostPort where = address.value_or(HostPort{"127.0.0.1", 0});
  if (!address) {
    Result<ChildProcess> child = ChildProcess::start(self_command({"bench", "listener"}));
    if (!child) return std::move(child).error();
    child_.emplace(std::move(*child));
    const Result<Json> said = child_->link().receive(kPatience);
    if (!said) return Error{said.error().code, "the listener did not start: " + child_->last_words()};
    where.port = said->value("port", std::uint16_t{0});
  }
  Result<OwnedFd> socket = net::connect_tcp(where);
  if (!socket) return std::move(socket).error();
  host_ = net::local_address(socket->get()).host;
  const int fd = socket->release();
  link_.emplace(fd, fd);
  return greet();
}

Result<void> FarSide::greet() {
  const Json own = host_facts();
  if (Result<void> ok = link_->send({{"do", "hello"}, {"version", own["version"]}}); !ok) return ok;
  const Result<Json> hello = link_->receive(10 * kSecond);
  if (!hello) return Error{hello.error().code, "no kvferry bench listener answers: " + hello.error().what};
  const Json version = hello->value("version", Json());
  if (version != own["version"])
    return Error{
        ErrorCode::kRefused,
        fmt::format("the listener is kvferry {} and this is kvferry {}; install the same version on both hosts",
                    version.dump(), own["version"].dump())};
  is_same_host_ = hello->value("boot_id", Json()) == own["boot_id"];
  return {};
}

Result<void> FarSide::install(const std::string& what) {
  if (child_) return {};  // the child shares this process's environment
  if (Result<void> ok = link_->send({{"do", "install"}, {"what", what}}); !ok) return ok;
  const Result<Json> done = checked(link_->receive(kInstallPatience));
  if (!done) return Error{done.error().code, "on the listener's host: " + done.error().what};
  return {};
}

}  // namespace kvferry::bench
