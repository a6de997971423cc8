// Fuzz targets for the messages in which nodes negotiate leases and pushes.
#include "connector/core/scheduler/scheduler_core.h"
#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/links/peer_links.h"
#include "connector/runtime/links/shapes.h"
#include "tests/fuzz/examples.h"
#include "tests/fuzz/target.h"

namespace kvferry::fuzz {
namespace {

// ---- messages ----

template <class Message>
void unseal_twice(const Envelope& envelope) {
  const Result<Message> message = unseal<Message>(envelope);
  if (!message) return;
  const std::string written = std::visit([](const auto& one) { return encode(one); }, *message);
  Envelope again = envelope;
  again.body = written;
  const Result<Message> second = unseal<Message>(again);
  KVFERRY_CHECK(second && std::visit([](const auto& one) { return encode(one); }, *second) == written,
                "a message is not read as it is written");
}

void run_node_messages(std::string_view bytes) {
  const Result<Envelope> envelope = decode<Envelope>(bytes, "message");
  if (!envelope) return;
  PeerVersions versions;
  (void)versions.check("peer", *envelope);
  (void)versions.learn("tcp://10.0.0.1:1", *envelope);
  unseal_twice<AnyMessage>(*envelope);
  (void)decode<StepPlan>(envelope->body, "plan");
  (void)decode<WorkerReport>(envelope->body, "report");
  (void)decode<WorkerHello>(envelope->body, "hello");
}

std::vector<std::string> node_message_seeds() {
  std::vector<std::string> seeds;
  for (const AnyMessage& message : examples_between_nodes()) seeds.push_back(encoded(message));
  return seeds;
}

// ---- nodes of other shapes: the input has bodies of LeaseAnswer, LeaseRequest and ChecksumOutcome, in turn ----

const std::vector<RankEndpoint> kHere = {{"address 0", "region 0", 256, {0, 2, 0, 2}},
                                         {"address 1", "region 1", 256, {0, 2, 2, 2}}};

/// The same ranks, of a model whose second layer has a state, a quarter of which is padding.
std::vector<RankEndpoint> here_with_parts() {
  std::vector<RankEndpoint> ranks = kHere;
  for (std::uint64_t rank = 0; rank < 2; ++rank)
    ranks[rank].parts = {0, {0, 1}, {{{256, rank * 128, 128}}, {{192, rank * 96, 96}, {0, 0, 32}}}};
  return ranks;
}

void run_shapes_of(const std::vector<RankEndpoint>& here, std::string_view bytes) {
  RunChecksums checksums(shards_of(here), parts_of(here));
  Cutter cutter(bytes);
  for (TimeNs now = kSecond; !cutter.empty(); now += 100 * kMillisecond) {
    if (auto answer = decode<LeaseAnswer>(cutter.part(), "answer")) {
      const Result<ShardMap> map = fit_answer(here, *answer);
      if (map) {
        StartPull pull;
        for (const LeasedChunk& chunk : answer->reply.chunks)
          pull.items.push_back({chunk.chunk, {0, 1}, 8, chunk.checksums, chunk.run_checksums});
        for (std::uint32_t rank = 0; rank < here.size(); ++rank)
          (void)order_for(rank, pull, here, answer->ranks, *map, now);
      }
    }
    if (const auto request = decode<LeaseRequest>(cutter.part(), "request")) {
      if (checksums.check(*request) && checksums.is_needed(*request) && !request->keys.empty()) {
        LeaseAnswer answer;
        answer.reply.chunks = {{0, {1, 7}, 8, {11, 12}, 0, {}}};
        (void)checksums.begin({"sender", 1, kNodeWireVersion}, *request, answer, now, kSecond);
      }
    }
    if (const auto outcome = decode<ChecksumOutcome>(cutter.part(), "outcome")) checksums.take(*outcome);
    (void)checksums.take_ready(now);
  }
  (void)checksums.take_ready(1'000 * kSecond);
  KVFERRY_CHECK(checksums.num_waiting() == 0, "an answer that waits for ever");
}

void run_shapes(std::string_view bytes) {
  run_shapes_of(kHere, bytes);
  run_shapes_of(here_with_parts(), bytes);
}

std::vector<std::string> shape_seeds() {
  LeaseAnswer same{{1, "", {{0, {1, 7}, 8, {11, 12}, 0, {}}}}, kHere};
  LeaseAnswer other{{1, "", {{0, {1, 7}, 8, {11}, 0, {{1, 2}, {3, 4}}}}}, {{"address", "region", 512, {0, 2, 0, 4}}}};
  const LeaseRequest request{"fingerprint", {ChunkKey{}}, "", {{0, 2, 0, 4}}};
  const ChecksumOutcome outcome{1, 0, 0, true, {1}};
  const ShardParts whole{0, {0, 1}, {{{256, 0, 256}}, {{192, 0, 192}, {0, 0, 64}}}};
  LeaseAnswer parted = other;
  parted.ranks[0].parts = whole;
  parted.reply.chunks[0].run_checksums = {{1, 2}, {3, 4}};
  const LeaseRequest parted_request{"fingerprint", {ChunkKey{}}, "", {{0, 2, 0, 4}}, false, 0, {whole}};
  return {as_part(encode(parted)) + as_part(encode(parted_request)) + as_part(encode(outcome)) + as_part("") +
              as_part("") + as_part(encode(ChecksumOutcome{1, 1, 0, true, {1, 2, 3}})),
          as_part(encode(same)) + as_part(encode(request)) + as_part(encode(outcome)) + as_part(encode(other)) +
              as_part("") + as_part(encode(ChecksumOutcome{1, 1, 0, true, {1}}))};
}

// ---- a scheduler core: the input has envelopes from any node, in the form in which the node's links pass them on ----

CoreConfig core_config() {
  CoreConfig config;
  config.fingerprint = "fingerprint";
  config.chunk_tokens = 8;
  config.groups = {{4}};
  config.num_slots = 8;
  return config;
}

void run_scheduler_core(std::string_view bytes) {
  SchedulerCore core(core_config());
  TimeNs now = kSecond;
  const std::vector<std::int32_t> tokens(20, 5);
  const RequestId id{"request"};
  NewRequest request;
  request.id = id;
  request.tokens = tokens;
  request.num_prompt_tokens = 20;
  request.handoff = true;
  request.push_to = "tcp://10.0.0.1:1";
  core.add_request(request, now);
  std::uint64_t fetch = 0;
  // numbers of leases, pushes and reservations; outsiders can't guess them, but this liar was given some
  std::vector<std::uint64_t> numbers;
  const auto known = [&](std::uint64_t number) { return number < numbers.size() ? numbers[number] : number; };
  Cutter cutter(bytes);
  for (; !cutter.empty(); now += 100 * kMillisecond) {
    const std::string from = cutter.byte() % 2 == 0 ? "tcp://10.0.0.1:1" : "tcp://10.0.0.2:1";
    (void)core.lookup(id, 0, now);
    for (const Action& action : core.take_actions()) {
      if (const auto* asked = std::get_if<QueryDirectory>(&action)) fetch = asked->fetch;
      if (const auto* offered = std::get_if<OfferPush>(&action)) numbers.push_back(offered->push);
    }
    if (fetch != 0) core.directory_answered(fetch, {{from, 2, {}}}, now);
    const auto envelope = decode<Envelope>(cutter.part(), "message");
    if (!envelope) continue;
    const auto message = unseal<AnyMessage>(*envelope);
    if (!message) continue;
    std::visit(
        Overloaded{[&](const LeaseRequest& one) { numbers.push_back(core.lease_requested(from, one, now).lease); },
                   [&](const LeaseRelease& one) { core.lease_released(known(one.value)); },
                   [&](const PushOffer& one) { numbers.push_back(core.push_offered(from, one, now).reservation); },
                   [&](const PushSettlement& one) {
                     core.push_settled({known(one.reservation), one.chunks}, now);
                   },
                   [&](const PushProgress& one) {
                     core.push_progressed({known(one.reservation), one.indices, one.done, one.of}, now);
                   },
                   [&](const LivesRequest& one) {
                     (void)core.recorder().find(one.request, now);
                     (void)core.recorder().find_trace(one.trace, now);
                     (void)core.recorder().newest(one.num_newest, now);
                     (void)core.recorder().slowest(one.num_slowest, now);
                   },
                   [&](const LeaseAnswer& one) { core.lease_answered(fetch, from, one.reply, now); },
                   [&](const PushAnswer& one) { core.push_answered(known(envelope->id), from, one.reply, now); },
                   [](const auto&) {}},  // other messages come only from the node's own workers
        *message);
    core.tick(now);
    (void)core.build_step({}, now);
  }
  core.tick(now + 100 * kSecond);
  KVFERRY_CHECK(core.num_reservations() == 0 || core.num_reserved_chunks() <= 8, "more slots than there are");
}

std::vector<std::string> scheduler_core_seeds() {
  std::string all;
  for (const AnyMessage& message : examples_between_nodes()) all += '\0' + as_part(encoded(message));
  return {all};
}

}  // namespace

const std::vector<Target> kConnectorTargets = {{"node_messages", run_node_messages, node_message_seeds},
                                               {"shapes", run_shapes, shape_seeds},
                                               {"scheduler_core", run_scheduler_core, scheduler_core_seeds}};

}  // namespace kvferry::fuzz
