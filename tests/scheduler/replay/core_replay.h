// Plays a trace to a scheduler core and compares its answers with the recorded ones.
#pragma once

#include <map>
#include <utility>

#include "trace.h"

namespace kvferry::replay {

/// Throws std::runtime_error at the first difference; broken promises go to the check handler.
class CoreReplay {
 public:
  explicit CoreReplay(const Trace& trace);
  void play(const Json& call);
  const SchedulerCore& core() const { return core_; }

 private:
  void lookup(const Json& call, TimeNs now);
  void step(const Json& call, TimeNs now);
  void finish(const Json& call, TimeNs now);
  void report(const Json& call, TimeNs now);
  void compare_saves(const Json& recorded, const std::vector<SaveJob>& planned, std::uint64_t step);
  void compare_loads(const Json& recorded, const std::vector<LoadJob>& planned, std::uint64_t step);
  void same_slot(const Json& recorded, ChunkRef planned, std::uint64_t step);

  SchedulerCore core_;
  std::map<std::pair<std::uint32_t, std::uint64_t>, ChunkRef> slots_;  // recorded (slot, generation) -> ours
};

}  // namespace kvferry::replay
