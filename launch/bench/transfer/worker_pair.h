// The two worker processes of one measurement: the initiator is a child of the driver, the target one of the listener.
#pragma once

#include <optional>

#include "launch/bench/harness/child_process.h"
#include "launch/bench/transfer/engine.h"

namespace kvferry::bench {

/// Starts both workers and connects them; the destructor stops both.
class WorkerPair {
 public:
  /// `listener` outlives the pair. `is_alone`: the engine needs no target process.
  static Result<WorkerPair> start(LineLink& listener, const WorkerSpec& initiator, int target_core, bool is_alone);
  WorkerPair(WorkerPair&& other) noexcept;
  WorkerPair& operator=(WorkerPair&&) = delete;
  ~WorkerPair();

  /// Sends a command to one side and returns its answer; errors name the side.
  Result<nlohmann::json> ask_initiator(const nlohmann::json& message);
  Result<nlohmann::json> ask_target(const nlohmann::json& message);
  /// Sends a command to both sides, which obey it at the same time.
  Result<void> ask_both(const nlohmann::json& message);
  struct Answers {
    nlohmann::json initiator;
    nlohmann::json target;
  };
  /// Sends the target's command, waits until the target is ready, then sends the initiator's.
  Result<Answers> ask_together(const nlohmann::json& initiator, const nlohmann::json& target);

  bool is_alone() const { return is_alone_; }
  std::uint64_t huge_page_bytes() const { return huge_page_bytes_; }  // in the initiator's memory

 private:
  WorkerPair(LineLink& listener, ChildProcess initiator, bool is_alone)
      : listener_(&listener), initiator_(std::move(initiator)), is_alone_(is_alone) {}
  Result<void> connect(const WorkerSpec& spec, int target_core);
  Result<nlohmann::json> receive_from_initiator();
  Result<nlohmann::json> receive_from_target();

  LineLink* listener_;  // nullptr after a move
  ChildProcess initiator_;
  bool is_alone_;
  bool has_target_ = false;
  std::uint64_t huge_page_bytes_ = 0;
};

}  // namespace kvferry::bench
