// The core of a prefill node that offers pushes to one decode node. The test plays the decode node and the workers.
#pragma once

#include <gmock/gmock.h>

#include "core_bench.h"

namespace kvferry::sim {

class PushBench : public CoreBench {
 protected:
  PushBench() : CoreBench(sizes(16, 16, 8)) {}
  /// Adds a prefill of `num_tokens` tokens, and returns the push offer.
  OfferPush offer(const std::string& id, std::uint32_t num_tokens) {
    NewRequest added = request(id, num_tokens);
    added.handoff = true;
    added.push_to = "tcp://decode:1";
    core_->add_request(added, now_);
    const auto offers = take<OfferPush>();
    EXPECT_THAT(offers, ::testing::SizeIs(1));
    return offers.at(0);
  }
  void answer(const OfferPush& offered, std::vector<std::uint8_t> verdicts, std::uint64_t reservation = 77) {
    core_->push_answered(offered.push, "tcp://decode:1", {reservation, {}, std::move(verdicts)}, now_);
  }
  /// Computes the first `num` tokens in one step, whose saves are reported unless `reports` is false.
  StepPlan prefill(const std::string& id, std::uint32_t num, bool reports = true) {
    const std::vector<BlockId> table = blocks(1, (num + 15) / 16);
    EXPECT_EQ(core_->lookup(RequestId{id}, 0, now_).num_external, 0u);
    core_->allocated(RequestId{id}, 0, {table}, now_);
    StepPlan plan = core_->build_step({{{RequestId{id}, 0, num, BlockTable{table}}}, {}}, now_ += kMillisecond);
    if (reports) core_->worker_report(well_done(plan), now_);
    return plan;
  }
  std::vector<SettledChunk> settled() {
    std::vector<SettledChunk> all;
    for (const SettlePush& one : take<SettlePush>())
      all.insert(all.end(), one.settlement.chunks.begin(), one.settlement.chunks.end());
    return all;
  }
};

}  // namespace kvferry::sim
