// Replays a trace on a scheduler core, and compares the core's answers with the recorded answers.
#pragma once

#include <map>
#include <utility>

#include "trace.h"

namespace kvferry::replay {

/// Throws std::runtime_error at the first difference. Broken promises are reported to the check handler.
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
  // maps a recorded (slot, generation) to the slot of this core
  std::map<std::pair<std::uint32_t, std::uint64_t>, ChunkRef> slots_;
};

}  // namespace kvferry::replay
