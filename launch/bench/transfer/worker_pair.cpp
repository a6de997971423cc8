#include "launch/bench/transfer/worker_pair.h"

#include <utility>

#include "launch/bench/transfer/worker_command.h"

namespace kvferry::bench {
namespace {

using Json = nlohmann::json;
constexpr TimeNs kPatienceWithWorker = kPatience + 10 * kSecond;  // so that the worker's own error comes first

}  // namespace

Result<WorkerPair> WorkerPair::start(LineLink& listener, const WorkerSpec& initiator, int target_core, bool is_alone) {
  Result<Command> command = worker_command(initiator);
  if (!command) return std::move(command).error();
  Result<ChildProcess> child = ChildProcess::start(*command);
  if (!child) return std::move(child).error();
  WorkerPair pair(listener, std::move(*child), is_alone);
  if (Result<void> ok = pair.connect(initiator, target_core); !ok) return std::move(ok).error();
  return pair;
}

WorkerPair::WorkerPair(WorkerPair&& other) noexcept
    : listener_(std::exchange(other.listener_, nullptr)),
      initiator_(std::move(other.initiator_)),
      is_alone_(other.is_alone_),
      has_target_(std::exchange(other.has_target_, false)),
      huge_page_bytes_(other.huge_page_bytes_) {}

WorkerPair::~WorkerPair() {
  if (!has_target_ || !listener_->send({{"do", "stop_worker"}})) return;
  // Answers of the worker may still arrive before the listener's own empty one.
  while (true) {
    const Result<Json> answer = listener_->receive(kPatience);
    if (!answer || answer->empty()) return;
  }
}

Result<void> WorkerPair::connect(const WorkerSpec& spec, int target_core) {
  if (Result<void> ok = initiator_.link().send(to_json(spec)); !ok) return ok;
  Result<Json> own = receive_from_initiator();
  if (!own) return std::move(own).error();
  huge_page_bytes_ = own->value("huge_page_bytes", std::uint64_t{0});
  if (is_alone_) return {};
  WorkerSpec target = spec;
  target.side = Side::kTarget;
  target.core = target_core;
  if (Result<void> ok = listener_->send({{"do", "start_worker"}, {"spec", to_json(target)}}); !ok) return ok;
  has_target_ = true;
  Result<Json> others = receive_from_target();
  if (!others) return std::move(others).error();
  if (Result<Json> ok = ask_target({{"do", "connect"}, {"peer", own->value("peer", Json::object())}}); !ok)
    return std::move(ok).error();
  if (Result<Json> ok = ask_initiator({{"do", "connect"}, {"peer", others->value("peer", Json::object())}}); !ok)
    return std::move(ok).error();
  return {};
}

Result<Json> WorkerPair::receive_from_initiator() {
  Result<Json> answer = checked(initiator_.link().receive(kPatienceWithWorker));
  if (answer || answer.error().code != ErrorCode::kPeerLost) return answer;
  return Error{ErrorCode::kPeerLost, fmt::format("the initiator's program ended: {}", initiator_.last_words())};
}

Result<Json> WorkerPair::receive_from_target() { return checked(listener_->receive(kPatienceWithWorker)); }

Result<Json> WorkerPair::ask_initiator(const Json& message) {
  (void)initiator_.link().send(message);  // if the program has ended, receiving gives the better error
  return receive_from_initiator();
}

Result<Json> WorkerPair::ask_target(const Json& message) {
  if (is_alone_) return Json::object();
  if (Result<void> ok = listener_->send(message); !ok) return std::move(ok).error();
  return receive_from_target();
}

Result<void> WorkerPair::ask_both(const Json& message) {
  if (!is_alone_) {
    if (Result<void> ok = listener_->send(message); !ok) return ok;
  }
  const Result<Json> own = ask_initiator(message);
  if (!own) return own.error();
  if (is_alone_) return {};
  const Result<Json> others = receive_from_target();
  if (!others) return others.error();
  return {};
}

Result<WorkerPair::Answers> WorkerPair::ask_together(const Json& initiator, const Json& target) {
  if (Result<Json> ready = ask_target(target); !ready) return std::move(ready).error();
  Result<Json> own = ask_initiator(initiator);
  if (!own) return std::move(own).error();
  Result<Json> others = is_alone_ ? Json::object() : receive_from_target();
  if (!others) return std::move(others).error();
  return Answers{std::move(*own), std::move(*others)};
}

}  // namespace kvferry::bench
