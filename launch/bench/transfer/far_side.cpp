#include "launch/bench/transfer/far_side.h"

#include "launch/bench/harness/failure.h"
#include "launch/bench/harness/figures_file.h"
#include "launch/bench/transfer/worker.h"

namespace kvferry::bench {

using Json = nlohmann::json;

void FarSide::open(const std::optional<HostPort>& address) {
  HostPort where = address.value_or(HostPort{"127.0.0.1", 0});
  if (!address) {
    child_.emplace(self_command({"bench", "listener"}));
    const Result<Json> said = child_->link().receive(kPatience);
    if (!said)
      throw Failure({said.error().code,
                     fmt::format("the benchmark's listener did not start: {}; the last line of its stderr: '{}'",
                                 said.error().what, child_->last_words())});
    where.port = said->value("port", std::uint16_t{0});
  }
  OwnedFd socket = need(net::connect_tcp(where));
  host_ = net::local_address(socket.get()).host;
  link_.emplace(std::move(socket));
  greet(where);
}

void FarSide::greet(const HostPort& where) {
  const Json own = host_facts();
  need(link_->send({{"do", "hello"}, {"version", own["version"]}}));
  const Result<Json> hello = link_->receive(10 * kSecond);
  if (!hello)
    throw Failure({hello.error().code, fmt::format("no listener of kvferry bench transfer answers at {}: {}",
                                                   net::to_text(where), hello.error().what)});
  const Json version = hello->value("version", Json());
  if (version != own["version"])
    throw Failure(
        {ErrorCode::kRefused,
         fmt::format("the listener at {} has version {} of kvferry, and this host has {}; install the same version on "
                     "both hosts",
                     net::to_text(where), version.dump(), own["version"].dump())});
  is_same_host_ = hello->value("boot_id", Json()) == own["boot_id"];
}

void FarSide::install(const std::string& what) {
  if (child_) return;  // the child has the same virtual environment as this process
  need(link_->send({{"do", "install"}, {"what", what}}));
  const Result<Json> done = checked(link_->receive(kInstallPatience));
  if (!done) throw Failure({done.error().code, "on the listener's host: " + done.error().what});
}

}  // namespace kvferry::bench
