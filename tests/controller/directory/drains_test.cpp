// Tests drains: only chunks that no other node has are copied, and the drain ends whatever its targets do.
#include "controller/directory/drains.h"

#include <gmock/gmock.h>

#include <map>
#include <set>

#include "tests/controller/fixtures.h"

namespace kvferry::controller {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr NodeId kLeaving{1}, kA{2}, kB{3};

class Draining : public ::testing::Test, public Drains::Cluster {
 protected:
  Drains::Place place_of(NodeId leaving, const ChunkKey& key) const override {
    for (const auto& [node, keys] : held)
      if (node != leaving && keys.contains(key)) return Drains::Place::kElsewhere;
    const auto mine = held.find(leaving);
    return mine != held.end() && mine->second.contains(key) ? Drains::Place::kOnlyThere : Drains::Place::kNowhere;
  }
  std::vector<NodeId> targets(NodeId) const override { return others; }

  std::vector<ChunkEntry> hold(NodeId node, std::uint32_t from, std::uint32_t to) {
    for (const ChunkKey& key : keys_of(from, to)) held[node].insert(key);
    return full_chunks(from, to);
  }
  void replicate(const Drains::Replication& replication) {
    for (const ChunkEntry& chunk : replication.chunks) held[replication.to].insert(chunk.key);
  }
  /// Calls advance() until nothing is copied any more. `serve` decides what the target does. Returns the number of
  /// copies.
  template <class Serve>
  std::size_t run(const Serve& serve) {
    std::size_t num_replications = 0;
    for (int i = 0; i < 1000 && !drains.progress(kLeaving).is_done(); ++i, now += 100 * kMillisecond) {
      for (const Drains::Replication& replication : drains.advance(*this, now)) {
        ++num_replications;
        serve(replication);
      }
    }
    return num_replications;
  }

  std::map<NodeId, std::set<ChunkKey>> held;
  std::vector<NodeId> others{kA, kB};
  Drains drains{{.chunks_per_replication = 10, .replications_max = 2}};
  TimeNs now = 0;
};

TEST_F(Draining, OnlyWhatOnlyItHoldsIsCopiedAndTheTargetsTakeTurns) {
  const auto chunks = hold(kLeaving, 0, 100);
  hold(kB, 0, 50);
  ASSERT_TRUE(drains.begin(kLeaving));
  EXPECT_FALSE(drains.begin(kLeaving));
  drains.published(kLeaving, chunks, SnapshotMark::kReplaces);
  EXPECT_EQ(run([&](const Drains::Replication& replication) { replicate(replication); }), 5u);
  for (const ChunkEntry& chunk : chunks) EXPECT_EQ(place_of(kLeaving, chunk.key), Drains::Place::kElsewhere);
  const Drains::Progress progress = drains.progress(kLeaving);
  EXPECT_TRUE(progress.is_done());
  EXPECT_EQ(progress.num_replicated, 50u);
  EXPECT_EQ(progress.num_lost, 0u);
  EXPECT_EQ(held[kA].size(), 30u);
}

TEST_F(Draining, NotMoreAtATimeThanAllowed) {
  drains.begin(kLeaving);
  drains.published(kLeaving, hold(kLeaving, 0, 100), SnapshotMark::kReplaces);
  EXPECT_THAT(drains.advance(*this, now), SizeIs(2));
  EXPECT_THAT(drains.advance(*this, now), IsEmpty());
  EXPECT_EQ(drains.progress(kLeaving).num_left, 100u);
}

TEST_F(Draining, ATargetThatCopiesNothingIsReplacedAndWhatNobodyCopiesIsLost) {
  drains.begin(kLeaving);
  drains.published(kLeaving, hold(kLeaving, 0, 20), SnapshotMark::kReplaces);
  run([&](const Drains::Replication& replication) {
    if (replication.to == kB) replicate(replication);
  });
  EXPECT_EQ(drains.progress(kLeaving).num_replicated, 20u);

  drains.published(kLeaving, hold(kLeaving, 200, 220), SnapshotMark::kReplaces);
  std::map<NodeId, int> asked;
  EXPECT_EQ(run([&](const Drains::Replication& replication) { asked[replication.to] += 1; }),
            6u);  // two copies, each tried three times
  EXPECT_EQ(drains.progress(kLeaving).num_lost, 20u);
  EXPECT_TRUE(drains.progress(kLeaving).is_done());
}

TEST_F(Draining, AnEvictedChunkIsNeitherMovedNorLost) {
  drains.begin(kLeaving);
  drains.published(kLeaving, hold(kLeaving, 0, 20), SnapshotMark::kReplaces);
  drains.advance(*this, now);
  held[kLeaving].clear();
  EXPECT_EQ(run([](const Drains::Replication&) {}), 0u);
  EXPECT_EQ(drains.progress(kLeaving).num_replicated, 0u);
  EXPECT_EQ(drains.progress(kLeaving).num_lost, 0u);
}

TEST_F(Draining, WithoutAnybodyElseItWaits) {
  others.clear();
  drains.begin(kLeaving);
  drains.published(kLeaving, hold(kLeaving, 0, 20), SnapshotMark::kReplaces);
  for (int i = 0; i < 100; ++i) EXPECT_THAT(drains.advance(*this, now += kSecond), IsEmpty());
  EXPECT_EQ(drains.progress(kLeaving).num_left, 20u);
  others = {kB};
  run([&](const Drains::Replication& replication) { replicate(replication); });
  EXPECT_EQ(drains.progress(kLeaving).num_replicated, 20u);
}

TEST_F(Draining, ItIsNotDoneBeforeTheNodeHasToldAll) {
  drains.begin(kLeaving);
  EXPECT_FALSE(drains.progress(kLeaving).is_done());
  drains.published(kLeaving, {}, SnapshotMark::kEnds);  // the end of a snapshot that began before the drain
  drains.published(kLeaving, hold(kLeaving, 0, 5), SnapshotMark::kBegins);
  run([&](const Drains::Replication& replication) { replicate(replication); });
  EXPECT_FALSE(drains.progress(kLeaving).is_done());
  drains.published(kLeaving, {}, SnapshotMark::kEnds);
  EXPECT_TRUE(drains.progress(kLeaving).is_done());
}

TEST_F(Draining, OneThatIsStoppedCopiesNothing) {
  drains.begin(kLeaving);
  drains.published(kLeaving, hold(kLeaving, 0, 5), SnapshotMark::kReplaces);
  EXPECT_TRUE(drains.end(kLeaving));
  EXPECT_FALSE(drains.end(kLeaving));
  EXPECT_THAT(drains.advance(*this, now), IsEmpty());
  drains.published(kLeaving, hold(kLeaving, 0, 5), SnapshotMark::kReplaces);
  EXPECT_TRUE(drains.empty());
}

}  // namespace
}  // namespace kvferry::controller
