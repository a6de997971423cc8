// The core of a prefill node that offers pushes to one decode node, and that of a decode node to which they are
// offered. The test plays the other node and the workers.
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

/// The core of a decode node that pulls the chunks of a push as they are announced.
class PullBench : public CoreBench {
 protected:
  PullBench() : CoreBench(sizes(16, 16, 8)) { core_->set_directory_up(true); }
  /// Returns the offer of a prompt: `num_tokens` of the tokens from number `first` on.
  PushOffer prompt(std::uint32_t num_tokens, std::uint32_t first = 0) {
    TokenChain chain(root_key("model", ""), 16, {});
    chain.append(std::span(tokens_).subspan(first, num_tokens));
    PushOffer made{"model", 1, {}, {}, 5, "tcp://p:1", true};
    for (std::uint32_t i = 0; i < chain.num_full_chunks(); ++i) made.chunks.push_back({chain.key(i), 16, {}});
    if (const std::uint32_t rest = num_tokens % 16; rest > 0)
      made.chunks.push_back({chain.tail_key(chain.num_full_chunks(), rest), rest, {}});
    return made;
  }
  PushReply offered(const PushOffer& offer) { return core_->push_offered("offer 9", offer, now_, "", 9); }
};

}  // namespace kvferry::sim
