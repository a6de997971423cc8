// Tests that each check of the simulator fails under the name of its promise.
#include "promises_check.h"

#include <gtest/gtest.h>

#include "sim_text.h"

namespace kvferry::sim {
namespace {

template <class Call>
void expect_broken(const std::string& promise, Call call) {
  try {
    call();
    ADD_FAILURE() << "nothing breaks " << promise;
  } catch (const Broken& broken) {
    EXPECT_EQ(promise_of(broken.what()), promise) << broken.what();
  }
}

CoreConfig config() {
  CoreConfig config;
  config.fingerprint = "model";
  config.chunk_tokens = 4;
  config.groups = {{4}};
  config.num_slots = 2;
  return config;
}

class Checks : public ::testing::Test {
 protected:
  Checks() : core_(config()), check_(config()) {}
  SchedulerCore core_;
  PromisesCheck check_;
};

TEST_F(Checks, AnAnswerLeavesATokenToComputeAndDoesNotPendForEver) {
  check_.lookup_answered("a", 4, {false, 3}, 8, 0);
  expect_broken("sane-counts", [&] { check_.lookup_answered("a", 4, {false, 4}, 8, 0); });
  expect_broken("sane-counts", [&] { check_.lookup_answered("a", 4, {true, 1}, 8, 0); });
  expect_broken("bounded-hold", [&] { check_.lookup_answered("a", 0, {true, 0}, 8, config().load_timeout); });
}

TEST_F(Checks, AskedAgainNothingChanges) {
  check_.asked_again("a", {false, 3}, {false, 3}, 1, 1);
  expect_broken("idempotent-lookup", [&] { check_.asked_again("a", {false, 3}, {false, 4}, 1, 1); });
  expect_broken("idempotent-lookup", [&] { check_.asked_again("a", {false, 3}, {false, 3}, 1, 2); });
}

TEST_F(Checks, APlanLoadsForWhoWasAdmittedAndNobodyElse) {
  StepPlan plan = core_.build_step({}, kSecond);
  const StepPlan* const plans[] = {&plan};
  check_.plan_built(core_, {}, plans);
  const AdmittedLoad admitted[] = {{"a", 0, 4, {{1, 2}}, false}};
  expect_broken("exact-load", [&] { check_.plan_built(core_, admitted, plans); });
  plan.loads.push_back({"b", 1, {{1}}, {}});
  expect_broken("exact-load", [&] { check_.plan_built(core_, {}, plans); });
}

TEST_F(Checks, APlanWritesOnlyWhatIsItsToWrite) {
  StepPlan plan;
  plan.saves_after.push_back({"a", {{1}}, {{{0, 1}, 0, 4}}});
  const StepPlan* const plans[] = {&plan};
  expect_broken("fenced-reuse", [&] { check_.plan_built(core_, {}, plans); });
}

TEST_F(Checks, ASaveCoversWhatIsComputedOfItsOwnBlocks) {
  const SaveJob job{"a", {{7}}, {{{0, 1}, 0, 4}}};
  check_.save_planned(job, {{3, 7}}, 8, 8);
  expect_broken("saved-is-computed", [&] { check_.save_planned(job, {{3, 7}}, 7, 8); });
  expect_broken("saved-is-computed", [&] { check_.save_planned(job, {{3, 7}}, 8, 7); });
  expect_broken("saved-is-computed", [&] { check_.save_planned(job, {{3, 8}}, 8, 8); });
}

TEST_F(Checks, ARequestEndsOnceWithCountsThatFit) {
  FinishedRequest done;
  done.known = true;
  done.admissions.push_back({.attempt = 1, .hit = 4, .local = 0, .to_load = 4, .loaded = 4});
  check_.ended("a", done, {{1, {4, false}}}, true);
  expect_broken("exactly-once", [&] { check_.ended("a", done, {{1, {4, false}}}, false); });
  expect_broken("sane-counts", [&] { check_.ended("a", done, {}, true); });
  done.admissions[0].loaded = 3;
  check_.ended("a", done, {{1, {3, true}}}, true);
  expect_broken("sane-counts", [&] { check_.ended("a", done, {{1, {3, false}}}, true); });
  expect_broken("sane-counts", [&] { check_.ended("a", done, {{1, {2, true}}}, true); });
  done.admissions[0].to_load = 5;
  expect_broken("sane-counts", [&] { check_.ended("a", done, {{1, {3, true}}}, true); });
}

TEST_F(Checks, ALeaseNamesWhatIsThere) {
  LeaseReply reply;
  LeaseRequest request;
  request.keys.resize(1);
  reply.chunks.push_back({0, {0, 0}, 4, {}});
  expect_broken("bounded-hold", [&] { PromisesCheck::offered(core_, reply, request); });
  reply.lease = 1;
  expect_broken("verified-only", [&] { PromisesCheck::offered(core_, reply, request); });
}

TEST_F(Checks, WhoeverIsIdleHoldsNothing) {
  PromisesCheck::idle(core_);
  const std::vector<std::int32_t> tokens(9, 1);
  NewRequest request;
  request.id = RequestId{"a"};
  request.tokens = tokens;
  core_.add_request(request, kSecond);
  expect_broken("bounded-hold", [&] { PromisesCheck::idle(core_); });
}

TEST(PromiseOf, TheFirstNameCountsAndWithoutOneTheCoreGaveUp) {
  EXPECT_EQ(promise_of("kvferry: failed check: exact-load: a (verified-only: b)"), "exact-load");
  EXPECT_EQ(promise_of("unordered_map::at"), "no-engine-death");
}

}  // namespace
}  // namespace kvferry::sim
