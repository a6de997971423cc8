// Tests that each promise's check fails if and only if the promise is broken.
#include "connector/core/promises.h"

#include <gtest/gtest.h>

#include <array>

#include "check_throws.h"

namespace kvferry::sim {
namespace {

class Promises : public ::testing::Test {
 protected:
  ChecksThrow checks_;
};

TEST_F(Promises, IdempotentLookup) {
  promise::idempotent_lookup(34, 34, "r");
  EXPECT_BREAKS(promise::idempotent_lookup(34, 32, "r"), "idempotent-lookup");
}

TEST_F(Promises, SaneCounts) {
  promise::sane_counts(16, 17, 34, "r");
  promise::sane_counts(34, 0, 34, "r");
  EXPECT_BREAKS(promise::sane_counts(16, 18, 34, "r"), "sane-counts");
  // a negative number, converted to an unsigned one
  EXPECT_BREAKS(promise::sane_counts(0, 0xffffffffu, 34, "r"), "sane-counts");
}

TEST_F(Promises, ExactLoad) {
  constexpr std::array<std::uint32_t, 1> kNeeded = {4};
  constexpr std::array<KvGroup, 1> kGroups = {{{16}}};
  constexpr std::array<KvGroup, 2> kUnlike = {{{16}, {8, 8}}};
  const LoadItem first{{1, 1}, {7}, 16, 4, 4, 12}, second{{2, 1}, {7}, 16, 0, 16, 2};
  const LoadJob job{"r", 1, {{5, 6}}, {first, second}};
  promise::exact_load(job, 4, 14, kGroups, kNeeded);
  EXPECT_BREAKS(promise::exact_load(job, 4, 15, kGroups, kNeeded), "exact-load");  // one token is missing
  EXPECT_BREAKS(promise::exact_load(job, 4, 13, kGroups, kNeeded), "exact-load");  // there is one token too many
  EXPECT_BREAKS(promise::exact_load(job, 0, 14, kGroups, kNeeded), "exact-load");  // the load begins at the wrong token
  LoadJob gap = job;
  gap.items[1].first_token = 17;
  EXPECT_BREAKS(promise::exact_load(gap, 4, 14, kGroups, kNeeded), "exact-load");
  LoadJob beyond = job;
  beyond.items[0].skip_tokens = 5;
  EXPECT_BREAKS(promise::exact_load(beyond, 4, 14, kGroups, kNeeded), "exact-load");
  LoadJob short_of_blocks = job;
  short_of_blocks.block_ids = {{5}};
  EXPECT_BREAKS(promise::exact_load(short_of_blocks, 4, 14, kGroups, kNeeded), "exact-load");
  LoadJob no_blocks = job;
  no_blocks.block_ids.clear();
  EXPECT_BREAKS(promise::exact_load(no_blocks, 4, 14, kGroups, kNeeded), "exact-load");
  LoadJob windowed = job;
  windowed.block_ids.push_back({kNoBlock, 16, 17});
  promise::exact_load(windowed, 4, 14, kUnlike, std::array<std::uint32_t, 2>{4, 8});
  EXPECT_BREAKS(promise::exact_load(windowed, 4, 14, kUnlike, std::array<std::uint32_t, 2>{4, 7}), "exact-load");
  EXPECT_BREAKS(promise::exact_load(windowed, 4, 14, kUnlike, kNeeded), "exact-load");
}

TEST_F(Promises, NoStaleSpec) {
  promise::no_stale_spec(0, 3);
  EXPECT_BREAKS(promise::no_stale_spec(1, 3), "no-stale-spec");
}

TEST_F(Promises, SavedIsComputed) {
  constexpr std::array<KvGroup, 1> kGroups = {{{16}}};
  const SaveJob job{"r", {{5}}, {{{1, 1}, 0, 16}}};
  promise::saved_is_computed(job, 32, 48, 48, kGroups);
  EXPECT_BREAKS(promise::saved_is_computed(job, 32, 47, 48, kGroups), "saved-is-computed");
  EXPECT_BREAKS(promise::saved_is_computed(job, 32, 48, 47, kGroups), "saved-is-computed");
  EXPECT_BREAKS(promise::saved_is_computed({"r", {{5}}, {{{1, 1}, 8, 16}}}, 0, 48, 48, kGroups), "saved-is-computed");
  EXPECT_BREAKS(promise::saved_is_computed({"r", {{5}}, {{{1, 1}, 0, 0}}}, 0, 48, 48, kGroups), "saved-is-computed");
}

TEST_F(Promises, SavedIsComputedAlike) {
  promise::saved_is_computed_alike(false, "r");
  EXPECT_BREAKS(promise::saved_is_computed_alike(true, "r"), "saved-is-computed");
}

TEST_F(Promises, FencedReuse) {
  promise::fenced_reuse(0, true, 3);
  EXPECT_BREAKS(promise::fenced_reuse(1, true, 3), "fenced-reuse");
  EXPECT_BREAKS(promise::fenced_reuse(0, false, 3), "fenced-reuse");
}

TEST_F(Promises, FairEviction) {
  promise::fair_eviction(true, 1, 2);
  promise::fair_eviction(false, 3, 2);
  EXPECT_BREAKS(promise::fair_eviction(false, 2, 2), "fair-eviction");
}

TEST_F(Promises, PurgedIsGone) {
  promise::purged_is_gone(false, 3);
  EXPECT_BREAKS(promise::purged_is_gone(true, 3), "purged-is-gone");
}

TEST_F(Promises, ExactlyOnce) {
  promise::exactly_once(true, "pull 1");
  EXPECT_BREAKS(promise::exactly_once(false, "pull 1"), "exactly-once");
}

TEST_F(Promises, BoundedHold) {
  promise::bounded_hold(5, 6, "r");
  EXPECT_BREAKS(promise::bounded_hold(5, 5, "r"), "bounded-hold");
  EXPECT_BREAKS(promise::bounded_hold(5, 6, ""), "bounded-hold");
}

TEST_F(Promises, VerifiedOnly) {
  promise::verified_only(true, 2, 2, 3);
  EXPECT_BREAKS(promise::verified_only(false, 2, 2, 3), "verified-only");
  EXPECT_BREAKS(promise::verified_only(true, 1, 2, 3), "verified-only");
  promise::verified_only_in_slots(0, 3);
  EXPECT_BREAKS(promise::verified_only_in_slots(1, 3), "verified-only");
  promise::verified_only_while_saved(true, 7, 0, 3);
  EXPECT_BREAKS(promise::verified_only_while_saved(false, 7, 0, 3), "verified-only");
  EXPECT_BREAKS(promise::verified_only_while_saved(true, 0, 0, 3), "verified-only");
  EXPECT_BREAKS(promise::verified_only_while_saved(true, 7, 1, 3), "verified-only");
  promise::verified_only_in_all_frames(1, std::array{2u, 1u}, 3);
  EXPECT_BREAKS(promise::verified_only_in_all_frames(2, std::array{2u, 1u}, 3), "verified-only");
  promise::verified_only_when_settled(false, false, 3);
  promise::verified_only_when_settled(true, true, 3);
  EXPECT_BREAKS(promise::verified_only_when_settled(true, false, 3), "verified-only");
}

}  // namespace
}  // namespace kvferry::sim
