// The two worker processes of a measurement: the initiator is a child of the driver, the target is a child of the
// listener.
#pragma once

#include "launch/bench/harness/programs.h"
#include "launch/bench/transfer/engine.h"
#include "launch/bench/transfer/worker.h"

namespace kvferry::bench {

/// The constructor starts the initiator; the destructor stops both workers.
class WorkerPair {
 public:
  /// `listener` must outlive the pair. `is_alone` is true if the engine needs no target process. `number` differs from
  /// that of all other pairs that exist meanwhile and have this listener.
  WorkerPair(LineLink& listener, const WorkerSpec& initiator, bool is_alone, std::size_t number)
      : listener_(listener), initiator_(worker_command(initiator)), is_alone_(is_alone), number_(number) {}
  WorkerPair(const WorkerPair&) = delete;
  WorkerPair& operator=(const WorkerPair&) = delete;
  ~WorkerPair();

  /// Sends the initiator its spec. Unless is_alone(), also starts the target and connects the two workers.
  void connect(const WorkerSpec& initiator, int target_core);
  /// Sends a command to one worker and returns its answer. If that worker has ended, the error says on which side.
  nlohmann::json ask_initiator(const nlohmann::json& message);
  nlohmann::json ask_target(const nlohmann::json& message);
  /// Sends a command to both workers, which execute it at the same time, and waits for their answers.
  void ask_both(const nlohmann::json& message);
  struct Answers {
    nlohmann::json initiator;
    nlohmann::json target;
  };
  /// Sends the target's command, waits until the target is ready, then sends the initiator's command.
  Answers ask_together(const nlohmann::json& initiator, const nlohmann::json& target);

  bool is_alone() const { return is_alone_; }
  std::uint64_t huge_page_bytes() const { return huge_page_bytes_; }  // bytes of the initiator's memory in huge pages

 private:
  Result<void> send_to_listener(nlohmann::json message);
  nlohmann::json receive_from_initiator();
  nlohmann::json receive_from_target();

  LineLink& listener_;
  ChildProcess initiator_;
  const bool is_alone_;
  const std::size_t number_;
  bool has_target_ = false;
  std::uint64_t huge_page_bytes_ = 0;
};

}  // namespace kvferry::bench
