// Tests how `kvferry bench controller --peers` reads the lines of the peers' programs. Shell scripts replace these
// programs.
#include "launch/bench/controller/controller_peers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

#include "launch/bench/harness/controller_load.h"
#include "launch/bench/harness/flags.h"

namespace kvferry::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

constexpr const char* kFigures = R"({"peer": {"engine": "fake", "version": "1.2", "notes": "made up",)"
                                 R"( "figures": {"lookup_128_per_s": 1000, "lookup_128_us_p50": 7.5}}})";

struct Lines {
  std::vector<std::string> lines;
  Say say() {
    return [this](const std::string& line) { lines.push_back(line); };
  }
};

PeerProgram shell(const std::string& text) {
  return [text](const std::string&, const Say&) -> Result<Command> { return Command{{"/bin/sh", "-c", text}, {}}; };
}

TEST(ControllerPeers, NamesAreTheKnownOnes) {
  FlagReader good;
  EXPECT_TRUE(good.peers("", kControllerPeers).empty());
  EXPECT_THAT(good.peers("redis,dynamo", kControllerPeers), ElementsAre("redis", "dynamo"));
  EXPECT_TRUE(good.result());
  for (const char* text : {"etcd", "redis,", ",", "redis,redis", "redis dynamo"}) {
    FlagReader reader;
    reader.peers(text, kControllerPeers);
    ASSERT_FALSE(reader.result()) << text;
    EXPECT_EQ(reader.result().error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(reader.result().error().what, HasSubstr("dynamo, lmcache, mooncake, redis")) << text;
  }
}

TEST(ControllerPeers, AProgramGetsTheLoadAndItsFiguresAreTaken) {
  Lines said;
  const auto figures = measure_controller_peers(
      {"redis"}, 65536, 3,
      shell(fmt::format(R"(read -r spec; echo "{{\"step\": \"got $(echo "$spec" | tr -d '"')\"}}"; echo '{}';)"
                        R"( echo '{{"done": true}}')",
                        kFigures)),
      said.say());
  ASSERT_TRUE(figures) << figures.error().what;
  EXPECT_TRUE(figures->missing.empty()) << figures->missing;
  ASSERT_EQ(figures->peers.size(), 1u);
  EXPECT_EQ(figures->peers[0], Json::parse(kFigures)["peer"]);
  EXPECT_THAT(said.lines, ElementsAre("got {hashes:65536,repeat:3,seconds:0.5}"));
}

TEST(ControllerPeers, WhatCantBeMeasuredIsOneLineThatSaysWhyAndTheNextOneIsMeasured) {
  // A peer's program may end before it reads the load. SIGPIPE is ignored for this case, as in kvferry's main().
  std::signal(SIGPIPE, SIG_IGN);
  const struct {
    const char* program;
    const char* why;
  } kCases[] = {
      {R"(read -r spec; echo '{"error": "no redis-server here", "code": 10}')", "no redis-server here"},
      {"echo 'Traceback' >&2; echo 'ModuleNotFoundError: hiredis' >&2; exit 1", "ModuleNotFoundError: hiredis"},
      {R"(read -r spec; echo '{"peer": {"engine": "fake"}}')", "a line that is neither a step, figures nor an error"},
      {"read -r spec; echo hello", "not a JSON object"},
  };
  for (const auto& [program, why] : kCases) {
    Lines said;
    const PeerProgram bad = shell(program);
    const PeerProgram good = shell(fmt::format("read -r spec; echo '{}'; echo '{{\"done\": true}}'", kFigures));
    const auto figures = measure_controller_peers(
        {"redis", "dynamo"}, 65536, 1,
        [&](const std::string& peer, const Say& say) { return (peer == "redis" ? bad : good)(peer, say); }, said.say());
    ASSERT_TRUE(figures);
    EXPECT_EQ(figures->peers.size(), 1u);
    EXPECT_THAT(figures->missing.value("redis", ""), HasSubstr(why));
    ASSERT_EQ(said.lines.size(), 1u);
    EXPECT_THAT(said.lines[0], ::testing::StartsWith("warning: redis is left out: "));
    EXPECT_THAT(said.lines[0], ::testing::Not(HasSubstr("\n")));
  }
}

TEST(ControllerPeers, APeerThatCantBeInstalledIsLeftOut) {
  Lines said;
  const auto figures = measure_controller_peers(
      {"lmcache"}, 65536, 1,
      [](const std::string&, const Say&) -> Result<Command> {
        return Error{ErrorCode::kUnavailable, "'pip install' failed: no network"};
      },
      said.say());
  ASSERT_TRUE(figures);
  EXPECT_EQ(figures->missing["lmcache"], "'pip install' failed: no network");
  EXPECT_EQ(controller_peers_table(*figures, Json::object()), "") << "no heading over nothing";
}

TEST(ControllerPeers, TheTableTellsHowManyTimesAsFastKvferryIs) {
  PeersFigures figures;
  figures.peers.push_back(Json::parse(kFigures)["peer"]);
  const std::string table = controller_peers_table(figures, {{"lookup_128_per_s", 26500.0}});
  EXPECT_THAT(table, ::testing::ContainsRegex("fake 1.2, in process +1000 +26.5 +7.5 +- "));
  EXPECT_THAT(table, ::testing::Not(HasSubstr("fake 1.2, remote")));
  EXPECT_THAT(table, HasSubstr("fake: made up"));
}

/// tests/launch/controller_peers_test.py expects the same number for the same load, which it makes in Python.
TEST(ControllerPeers, TheLoadIsWhatThePeersGetToo) {
  std::uint64_t digest = 0;
  std::vector<std::uint64_t> keys(kBatchKeys);
  for_each_batch(0, 200, [&](std::uint32_t worker, std::uint64_t prefix, std::uint64_t position) {
    fill_keys<std::uint64_t>(prefix, position, keys);
    digest = scramble(digest ^ scramble(worker) ^ keys.front() ^ scramble(keys.back()));
  });
  EXPECT_EQ(digest, 4149750175108327567u);
}

}  // namespace
}  // namespace kvferry::bench
