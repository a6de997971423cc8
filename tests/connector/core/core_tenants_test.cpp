// Tests tenants that share a pool: how much load one has changes nothing of what the others find there, as long as they
// have no more than their share.
#include <gmock/gmock.h>

#include "core_bench.h"

namespace kvferry::sim {
namespace {

using ::testing::Each;
using ::testing::SizeIs;

constexpr std::uint32_t kChunks = 3;  // full chunks of a prompt
constexpr std::uint32_t kPromptTokens = 4 * kChunks + 1;

class SharedPool : public CoreBench {
 protected:
  static CoreConfig without_tails() {
    CoreConfig config = sizes(4, 4, 4 * kChunks);
    config.save_partial_chunks = false;
    return config;
  }
  SharedPool() : CoreBench(without_tails()) {}

  /// Serves one prompt of a tenant, from its arrival to its end. Returns how many of its tokens were found.
  std::uint32_t serve(const std::string& salt, std::uint32_t number) {
    const RequestId id{fmt::format("{} {} {}", salt, number, ++num_served_)};
    NewRequest added = request(id.value, kPromptTokens);
    added.tokens.assign(tokens_.data() + number, tokens_.data() + number + kPromptTokens);
    added.extras = added.cache_salt = salt;
    core_->add_request(added, now_);
    const std::uint32_t found = lookup(id.value).num_external;
    const BlockTable table{blocks(1, kChunks + 1)};
    core_->allocated(id, found, table, now_);
    build({{{id, found, kPromptTokens - found, table}}, {}});
    core_->finished(id, kPromptTokens, table, false, now_);
    build();
    return found;
  }
  /// Serves 20 rounds of ten new prompts of one tenant, then two prompts of another, the same ones in each round.
  /// Returns what was found of the latter, after the first round.
  std::vector<std::uint32_t> hits_beside_ten_times_the_load(const std::string& busy, const std::string& other) {
    std::vector<std::uint32_t> found;
    for (std::uint32_t round = 0; round < 20; ++round) {
      for (std::uint32_t prompt = 0; prompt < 10; ++prompt) serve(busy, 100 + 10 * round + prompt);
      for (const std::uint32_t prompt : {1, 2}) {
        found.push_back(serve(other, prompt));
        if (round > 0) num_of_other_ = std::min(num_of_other_, slots_of(other));
      }
    }
    return {found.begin() + 2, found.end()};
  }
  std::uint32_t slots_of(const std::string& salt) const {
    std::uint32_t num_slots = 0;
    core_->pool().tenants().for_each([&](const TenantSlots::Tenant& tenant) {
      if (tenant.id == tenant_of(salt)) num_slots = tenant.num_slots;
    });
    return num_slots;
  }

  int num_served_ = 0;
  std::uint32_t num_of_other_ = UINT32_MAX;  // the fewest slots that the other tenant had after the first round
};

TEST_F(SharedPool, ATenantAtTenTimesTheLoadEvictsNobodyBeyondItsShare) {
  EXPECT_THAT(hits_beside_ten_times_the_load("busy", "other"), Each(kPromptTokens - 1));
  EXPECT_EQ(num_of_other_, 2 * kChunks) << "half of the pool";
  EXPECT_EQ(slots_of("busy"), 2 * kChunks);
  EXPECT_GT(core_->counters().evicted_for_tenants, 0u);
}

TEST_F(SharedPool, WithoutTenantsTheSameLoadFindsNothing) {
  EXPECT_THAT(hits_beside_ten_times_the_load("", ""), Each(0u)) << "otherwise the test above would prove nothing";
  EXPECT_EQ(core_->counters().evicted_for_tenants, 0u);
}

TEST_F(SharedPool, RequestsWithoutASaltAreATenantToo) {
  EXPECT_THAT(hits_beside_ten_times_the_load("", "other"), Each(kPromptTokens - 1));
  EXPECT_EQ(slots_of(""), 2 * kChunks);
}

TEST_F(SharedPool, ManySaltsOfOneTenantHaveOneShare) {
  for (const std::uint32_t prompt : {1, 2}) serve("kvferry.b.0", prompt);
  for (std::uint32_t user = 0; user < 50; ++user) serve(fmt::format("kvferry.a.{}", user), 7);
  for (const std::uint32_t prompt : {1, 2}) EXPECT_EQ(serve("kvferry.b.0", prompt), kPromptTokens - 1);
  EXPECT_EQ(core_->pool().tenants().num_tenants(), 2u);
}

TEST_F(SharedPool, AloneATenantHasTheWholePool) {
  for (std::uint32_t prompt = 1; prompt <= 4; ++prompt) serve("only", prompt);
  EXPECT_EQ(slots_of("only"), 4 * kChunks);
  for (std::uint32_t prompt = 1; prompt <= 4; ++prompt) EXPECT_EQ(serve("only", prompt), kPromptTokens - 1);
}

TEST_F(SharedPool, ChunksThatOtherNodesPushOrCopyAreTheirTenants) {
  PushOffer offer{"model", 1, {}, {{root_key("pushed", ""), 4, {}}}, tenant_of("other")};
  EXPECT_NE(core_->push_offered("p", offer, now_).reservation, 0u);
  EXPECT_EQ(slots_of("other"), 1u);
  const ChunkKey key = root_key("copied", "");
  core_->replicate_ordered({"tcp://far", {{key, 0, false, {}}}, kSecond}, now_);
  const std::vector<RequestLease> leases = take<RequestLease>();
  ASSERT_THAT(leases, SizeIs(1));
  LeaseReply reply{1, {}, {{0, {0, 1}, 4, {5}}}};
  reply.chunks[0].tenant = tenant_of("other");
  core_->lease_answered(leases[0].fetch, "tcp://far", reply, now_);
  EXPECT_EQ(slots_of("other"), 2u);
}

TEST_F(SharedPool, AnOfferAndALeaseTellTheTenant) {
  serve("other", 1);
  TokenChain chain(root_key("model", "other"), 4, {});
  chain.append(std::span(tokens_).subspan(1, kPromptTokens));
  const LeaseReply reply = core_->lease_requested("reader", {"model", {chain.key(0)}, {}}, now_);
  ASSERT_THAT(reply.chunks, SizeIs(1));
  EXPECT_EQ(reply.chunks[0].tenant, tenant_of("other"));
  NewRequest added = request("pushed", kPromptTokens);
  added.extras = added.cache_salt = "third";
  added.handoff = true;
  added.push_to = "tcp://d:1";
  core_->add_request(added, now_);
  const std::vector<OfferPush> offers = take<OfferPush>();
  ASSERT_THAT(offers, SizeIs(1));
  EXPECT_EQ(offers[0].offer.tenant, tenant_of("third"));
}

}  // namespace
}  // namespace kvferry::sim
