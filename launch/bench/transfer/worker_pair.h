// The two worker processes of one measurement: the initiator's is our child, the target's the listener's.
#pragma once

#include <optional>

#include "launch/bench/harness/child_process.h"
#include "launch/bench/transfer/engine.h"

namespace kvferry::bench {

/// Starts both, connects them, and stops both when it goes.
class WorkerPair {
 public:
  /// `listener` is borrowed. `is_alone`: the engine needs no target process.
  static Result<WorkerPair> start(LineLink& listener, WorkerSpec initiator, int target_core, bool is_alone);
  WorkerPair(WorkerPair&& other) noexcept;
  WorkerPair& operator=(WorkerPair&&) = delete;
  ~WorkerPair();

  /// One command to both sides at a time, or to one; errors name the side.
  Result<nlohmann::json> ask_initiator(const nlohmann::json& message);
  Result<nlohmann::json> ask_target(const nlohmann::json& message);
  Result<void> ask_both(const nlohmann::json& message);
  /// The target's command goes first and is waited for until it says ready; then the initiator's runs.
  struct Answers {
    nlohmann::json initiator;
    nlohmann::json target;
  };
  Result<Answers> ask_together(const nlohmann::json& initiator, const nlohmann::json& target);

  bool is_alone() const { return is_alone_; }
  std::uint64_t huge_page_bytes() const { return huge_page_bytes_; }  // of the initiator's memory

 private:
  WorkerPair(LineLink& listener, ChildProcess initiator, bool is_alone)
      : listener_(&listener), initiator_(std::move(initiator)), is_alone_(is_alone) {}
  Result<void> connect(const WorkerSpec& spec, int target_core);
  Result<nlohmann::json> hear_initiator();
  Result<nlohmann::json> hear_target();

  LineLink* listener_;  // nullptr: moved away
  ChildProcess initiator_;
  bool is_alone_;
  bool has_target_ = false;
  std::uint64_t huge_page_bytes_ = 0;
};

}  // namespace kvferry::bench
