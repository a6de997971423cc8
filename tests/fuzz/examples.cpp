#include "tests/fuzz/examples.h"

#include <algorithm>

#include "tests/controller/fixtures.h"

namespace kvferry::fuzz {

using namespace controller;  // NOLINT(google-build-using-namespace)

namespace {

constexpr Shard kShard{0, 2, 0, 4};
const std::vector<std::uint64_t> kSums = {11};
const std::vector<std::vector<std::uint64_t>> kRunSums = {{12, 13}};

/// Two layers of 128 bytes: KV, and a state of one divided part and padding.
ShardParts parts() { return {0, {0, 1}, {{{256, 128, 128}}, {{192, 96, 96}, {0, 0, 32}}}}; }

RankEndpoint rank() { return {"address", "region", 256, kShard, "frames", 256, parts()}; }

ChunkRef chunk() { return {1, 7}; }

wire::TailColumns tails() { return wire::to_columns(std::vector{tail_chunk(5, 6), tail_chunk(7, 8)}); }

Holder holder() {
  return {EngineId{"b"}, Incarnation{1}, "tcp://10.0.0.1:1", 2, {tail_chunk(5, 6)}, Tier::kHost, true};
}

Status status() {
  Status status;
  static_cast<NodeInfo&>(status.nodes.emplace_back()) = node_info("b");
  status.nodes.back().report = std::make_shared<NodeReport>(example_report());
  status.lost = {{status.nodes.back(), 1000}};
  status.state.folder = "state";
  status.scale.replicas = {{"r", "tcp://10.0.0.1:1"}};
  return status;
}

/// Returns the examples, and a default message of each kind for which there is no example.
template <class Message, std::size_t kKind = 0>
std::vector<Message> with_all_kinds(std::vector<Message> examples) {
  if constexpr (kKind == std::variant_size_v<Message>) {
    return examples;
  } else {
    const auto is_of_kind = [](const Message& message) { return message.index() == kKind; };
    if (std::none_of(examples.begin(), examples.end(), is_of_kind)) examples.emplace_back(std::in_place_index<kKind>);
    return with_all_kinds<Message, kKind + 1>(std::move(examples));
  }
}

}  // namespace

NodeReport example_report() {
  NodeReport report{.num_slots = 10, .num_chunks = 4, .chunk_bytes = 100, .tokens = 50, .loaded_tokens = 20.5};
  report.paths = {{"tcp://10.0.0.1:1", "shm", true, 1000, 1, 0.5, 2}};
  report.failures = {{"the transfer failed", "tcp://10.0.0.1:1", 1500}};
  report.prefixes = {{"0123abcd", 12.5}};
  return report;
}

std::vector<wire::FromNode> examples_from_node() {
  std::vector<wire::FromNode> examples = {
      wire::Hello{.node = node_info("b"), .oldest_protocol = 1, .newest_protocol = 1},
      wire::Heartbeat{.incarnation = 1,
                      .next_sequence = 2,
                      .digests = {{1, 2}, {3, 4}},
                      .load = 3,
                      .wall_ms = 4,
                      .report = encode(example_report())},
      wire::Publish{.incarnation = 1, .full = {keys_of(0, 3)}, .tails = tails()},
      wire::Evict{.incarnation = 1, .sequence = 1, .keys = {keys_of(0, 1)}},
      wire::Lookup{.incarnation = 1,
                   .token = 5,
                   .keys = {keys_of(0, 3)},
                   .tail_groups = {keys_of(6, 7)},
                   .exact_tails = {keys_of(5, 6)}},
      wire::Leave{.incarnation = 1},
      wire::AdminRequest{.token = 1,
                         .verb = "pin",
                         .engine_id = "b",
                         .other_engine_id = "c",
                         .owner = "me",
                         .keys = {keys_of(0, 2)},
                         .ttl_ms = 1000,
                         .number = 1},
      wire::StatusRequest{}};
  return with_all_kinds(std::move(examples));
}

std::vector<wire::FromController> examples_from_controller() {
  std::vector<wire::FromController> examples = {
      wire::Registered{.incarnation = 1, .snapshot_wanted = true, .replicas = {"tcp://10.0.0.1:1"}},
      wire::Refused{.reason = "no"},
      wire::HeartbeatAck{.incarnation = 1, .kept_below = 2, .replicas = {"tcp://10.0.0.1:1"}},
      wire::LookupReply{.token = 1, .holders = {holder(), holder()}, .index_version = 3},
      wire::SnapshotWanted{.incarnation = 1, .next_sequence = 2, .resend_will_do = true, .resend_from = 1},
      wire::Unregistered{.incarnation = 1},
      wire::AdminReply{.token = 1, .is_done = true, .text = "done", .number = 1},
      wire::Pin{.incarnation = 1, .pin_id = 2, .ttl_ms = 1000, .keys = {keys_of(0, 2)}},
      wire::Unpin{.incarnation = 1, .pin_id = 2},
      wire::Replicate{.incarnation = 1,
                      .engine_id = "c",
                      .endpoint = "tcp://127.0.0.1:1",
                      .ttl_ms = 1000,
                      .full = {keys_of(0, 2)},
                      .tails = tails()},
      wire::EvictOrder{.incarnation = 1, .keys = {keys_of(0, 1)}},
      wire::PurgeOrder{.incarnation = 1, .purge_id = 2, .giver = "tcp://127.0.0.1:1"},
      wire::StatusReply{.status = status()}};
  return with_all_kinds(std::move(examples));
}

std::vector<AnyMessage> examples_between_nodes() {
  const PullItem item{chunk(), {2, 7}, 8, kSums, {}};
  PullOrder of_another_shape{3, {}, {}, 100, {{chunk(), {2, 7}, 8, {}, kRunSums}}};
  of_another_shape.sources = {{"address", "region", 256}};
  of_another_shape.runs = {{0, 0, 0, 4}, {0, 4, 4, 4}};
  of_another_shape.num_cells = 8;
  LeaseRelease release;
  release.value = 1;
  PushDrop drop;
  drop.value = 1;
  FrameUnpin unpin;
  unpin.value = 1;
  const Revocation revocation{1, 0, {{0, chunk(), true, kSums}}};
  Revoked revoked;
  static_cast<Revocation&>(revoked) = revocation;
  std::vector<AnyMessage> examples = {
      LeaseRequest{"fingerprint", keys_of(0, 3), "request", {kShard}, true, 0, {parts()}, true},
      LeaseAnswer{{1, "", {{0, chunk(), 8, kSums, 0, kRunSums, {3, kNoFrame}, 0, {}, {"?"}, true}}}, {rank()}},
      release,
      PullOrder{2, "address", "region", 100, {item}},
      PullOutcome{2, 0, {true, false}, "why", kSums},
      PushOffer{"fingerprint", 1, {kShard}, {{key_of(0), 8, {}}, {key_of(5), 5, key_of(6)}}},
      PushOffer{"fingerprint", 1, {}, {{key_of(0), 8, {}}}, 0, "tcp://10.0.0.1:1", true},
      PushAnswer{{1, "", {2, 1, 0}}, {rank()}, {{"grant", "", ""}}},
      PushAnswer{{1, "", {3, 3}}, {rank()}, {{}}},
      PushSettlement{1, {{0, true, 0, kSums}}},
      LivesRequest{"request"},
      LivesAnswer{{{"request", false, {{}}}}},
      GrantOrder{1, {{0, {3, 7}, 8}}, kSecond, "member"},
      GrantOutcome{1, 0, {"grant"}},
      revocation,
      revoked,
      PushOrder{1, "address", {"grant"}},
      PushStart{1, 0, chunk(), 8, kSums},
      drop,
      PushOutcome{1, 0, 0, true, ""},
      ChecksumOrder{1, 8, {{0, 0, 0, 4}, {0, 4, 0, 4}}, {{chunk(), 8, 11}}, 100, 0},
      ChecksumOutcome{1, 0, 0, true, {12, 13}},
      FramePinOrder{1, 0, 100, {chunk()}},
      FramePinOutcome{1, 0, {3}},
      unpin,
      SlotsWritten{0, {chunk()}, {true}},
      PushProgress{1, {0, 1}, 1, 4},
      LayersSaved{1, 0, {0, 1}, 1, 4},
      PullProgress{4, {0}, 1, 4, false, {}},
      PullProgress{4, {0}, 0, 0, true, kSums}};
  PullItem growing{chunk(), {3, 7}, 8, {}, {}, {0}, true, true};
  PullOrder of_layers{4, "address", "region", 100, {growing}};
  of_layers.remote_frames = "region";
  of_layers.remote_frame_bytes = 256;
  examples.emplace_back(of_layers);
  LeaseAnswer of_growing{{1, "", {{0, chunk(), 8, {}, 0, {}, {3}, 0, {}, {"?"}, true}}}, {rank()}};
  of_growing.reply.chunks[0].is_growing = true;
  examples.emplace_back(of_growing);
  examples.emplace_back(of_another_shape);
  return examples;
}

namespace {
template <class Message>
std::string encoded_alternative(const Message& message) {
  return std::visit([](const auto& one) { return encode(one); }, message);
}
}  // namespace

std::string encoded(const wire::FromNode& message) { return encoded_alternative(message); }
std::string encoded(const wire::FromController& message) { return encoded_alternative(message); }
std::string encoded(const AnyMessage& message, std::uint64_t id) {
  return std::visit([id](const auto& one) { return seal(id, one); }, message);
}

}  // namespace kvferry::fuzz
