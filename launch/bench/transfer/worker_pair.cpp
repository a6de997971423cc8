#include "launch/bench/transfer/worker_pair.h"

namespace kvferry::bench {
namespace {

using Json = nlohmann::json;
// Longer than kPatience, so that the worker reports its own timeout first.
constexpr TimeNs kPatienceWithWorker = kPatience + 10 * kSecond;

}  // namespace

WorkerPair::~WorkerPair() {
  if (!has_target_ || !send_to_listener({{"do", "stop_worker"}})) return;
  // Late answers of the target may arrive before the listener's own answer.
  while (true) {
    const Result<Json> answer = listener_.receive(kPatience);
    if (!answer || answer->contains("stopped")) return;
  }
}

void WorkerPair::connect(const WorkerSpec& spec, int target_core) {
  need(initiator_.link().send(to_json(spec)));
  const Json own = receive_from_initiator();
  huge_page_bytes_ = own.value("huge_page_bytes", std::uint64_t{0});
  if (is_alone_) return;
  WorkerSpec target = spec;
  target.side = Side::kTarget;
  target.core = target_core;
  need(send_to_listener({{"do", "start_worker"}, {"spec", to_json(target)}}));
  has_target_ = true;
  const Json others = receive_from_target();
  ask_target({{"do", "connect"}, {"peer", own.value("peer", Json::object())}});
  ask_initiator({{"do", "connect"}, {"peer", others.value("peer", Json::object())}});
}

Result<void> WorkerPair::send_to_listener(Json message) {
  message["worker"] = number_;
  return listener_.send(message);
}

Json WorkerPair::receive_from_initiator() {
  Result<Json> answer = checked(initiator_.link().receive(kPatienceWithWorker));
  if (!answer && answer.error().code == ErrorCode::kPeerLost)
    throw Failure({ErrorCode::kPeerLost,
                   fmt::format("the measuring process on this side ended; the last line of its stderr: '{}'",
                               initiator_.last_words())});
  return need(std::move(answer));
}

Json WorkerPair::receive_from_target() { return need(checked(listener_.receive(kPatienceWithWorker))); }

Json WorkerPair::ask_initiator(const Json& message) {
  // A failure to send is ignored: if the initiator has ended, receive_from_initiator() throws a better error.
  (void)initiator_.link().send(message);
  return receive_from_initiator();
}

Json WorkerPair::ask_target(const Json& message) {
  if (is_alone_) return Json::object();
  need(send_to_listener(message));
  return receive_from_target();
}

void WorkerPair::ask_both(const Json& message) {
  if (!is_alone_) need(send_to_listener(message));
  ask_initiator(message);
  if (!is_alone_) receive_from_target();
}

WorkerPair::Answers WorkerPair::ask_together(const Json& initiator, const Json& target) {
  ask_target(target);
  Json own = ask_initiator(initiator);
  return {std::move(own), is_alone_ ? Json::object() : receive_from_target()};
}

}  // namespace kvferry::bench
