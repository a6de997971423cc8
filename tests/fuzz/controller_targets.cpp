// Fuzz targets for the messages between nodes, engines and controllers, without sockets.
#include "controller/client/client_session.h"
#include "controller/directory/sessions.h"
#include "controller/engines/engine_events.h"
#include "controller/engines/engine_index.h"
#include "controller/engines/engine_stream.h"
#include "controller/protocol/msgpack_reader.h"
#include "controller/protocol/wire.h"
#include "controller/scale/event_log.h"
#include "tests/controller/fixtures.h"
#include "tests/fuzz/examples.h"
#include "tests/fuzz/target.h"

namespace kvferry::fuzz {

using namespace controller;  // NOLINT(google-build-using-namespace)

namespace {

// ---- messages ----

template <class Message>
void parse_twice(std::string_view bytes) {
  const Result<Message> message = wire::parse<Message>(bytes);
  if (!message) return;
  const std::string written = encoded(*message);
  const Result<Message> again = wire::parse<Message>(written);
  KVFERRY_CHECK(again && encoded(*again) == written, "a message is not read as it is written");
}

void run_controller_messages(std::string_view bytes) {
  parse_twice<wire::FromNode>(bytes);
  parse_twice<wire::FromController>(bytes);
  const auto fields = wire::read_lookup(bytes);
  const auto message = wire::parse<wire::FromNode>(bytes);
  if (fields) {
    const wire::Lookup* lookup = message ? std::get_if<wire::Lookup>(&*message) : nullptr;
    KVFERRY_CHECK(
        lookup != nullptr && lookup->token == fields->token && lookup->keys.keys.size() == fields->query.keys.size(),
        "the two readers of a lookup disagree");
  }
  if (const auto* publish = message ? std::get_if<wire::Publish>(&*message) : nullptr) (void)wire::chunks_of(*publish);
  MsgpackReader reader(bytes);
  while (reader.skip()) {
  }
}

std::vector<std::string> controller_message_seeds() {
  std::vector<std::string> seeds;
  for (const auto& message : examples_from_node()) seeds.push_back(encoded(message));
  for (const auto& message : examples_from_controller()) seeds.push_back(encoded(message));
  return seeds;
}

void run_node_reports(std::string_view bytes) {
  const Result<NodeReport> report = parse_report(bytes);
  if (!report) return;
  for (const FailureReport& failure : report->failures)
    KVFERRY_CHECK(report_text(failure.what) == failure.what, "a report has a text that is not printable");
}

std::vector<std::string> node_report_seeds() { return {encode(example_report()), encode(NodeReport{})}; }

// ---- a controller's sessions: the number of its connection precedes each message ----

class NoReplies final : public ReplySender {
 public:
  bool send(ConnectionId, std::string_view) override { return true; }
};

void run_sessions(std::string_view bytes) {
  Sessions sessions({}, 0);
  NoReplies replies;
  const std::vector<ConnectionId> connections = {sessions.open(), sessions.open(), sessions.open(), sessions.open()};
  Cutter cutter(bytes);
  for (TimeNs now = kSecond; !cutter.empty(); now += 10 * kMillisecond) {
    const std::uint8_t what = cutter.byte();
    if (what == 0xff) {
      sessions.expire(now += kSecond);
    } else if (what == 0xfe) {
      sessions.disconnected(connections[cutter.byte() % 4]);
    } else {
      sessions.receive(connections[what % 4], cutter.part(), now, replies);
    }
  }
  (void)sessions.status(1'000 * kSecond);
  sessions.expire(2'000 * kSecond);
  KVFERRY_CHECK(sessions.num_sessions() <= 4, "{} sessions of 4 connections", sessions.num_sessions());
}

std::vector<std::string> session_seeds() {
  std::string all, two;
  for (const auto& message : examples_from_node()) {
    const std::string part = as_part(encoded(message));
    all += '\0' + part;
    two += '\0' + part + '\1' + part;
  }
  const wire::Hello other{.node = node_info("c")};
  const wire::AdminRequest move{.verb = "move", .engine_id = "b", .other_engine_id = "c", .keys = {keys_of(0, 2)}};
  const wire::AdminRequest drain{.verb = "drain", .engine_id = "b"}, purge{.verb = "purge", .engine_id = "b"};
  return {all, two,
          '\1' + as_part(encode(other)) + all.substr(0, all.size() / 2) + '\1' + as_part(encode(move)) + '\1' +
              as_part(encode(drain)) + '\1' + as_part(encode(purge)) + '\xff' + std::string("\xfe\0", 2)};
}

// ---- a node's session with a controller ----

void run_client_session(std::string_view bytes) {
  ClientOptions options;
  options.node = node_info("b");
  std::size_t num_sent = 0;
  ClientSession session(
      options,
      [&](std::string_view message) {
        num_sent += message.size();
        return true;
      },
      4096);
  std::vector<ClientEvent> events;
  TimeNs now = kSecond;
  session.send_due(now);
  session.publish(full_chunks(0, 3));
  Cutter cutter(bytes);
  while (!cutter.empty()) {
    session.receive(cutter.part(), events);
    if (session.is_registered()) (void)session.lookup({.keys = keys_of(0, 3), .tail_groups = {}, .exact_tails = {}});
    if (cutter.byte() % 8 == 1) session.end_snapshot();
    session.check_silence(now, events);
    session.send_due(now += 100 * kMillisecond);
  }
}

std::vector<std::string> client_session_seeds() {
  std::string all;
  for (const auto& message : examples_from_controller()) {
    if (!std::holds_alternative<wire::Refused>(message)) all += as_part(encoded(message)) + '\1';
  }
  return {all};
}

// ---- the events of engines ----

class IndexSink final : public EngineEventSink {
 public:
  void stored(const BlocksStored& blocks) override { index_.stored(holder_, blocks); }
  void removed(const BlocksRemoved& blocks) override { index_.removed(holder_, blocks); }
  void all_cleared() override { index_.clear(holder_); }
  void flush() { index_.flush(); }

 private:
  EngineIndex index_{EngineIndexOptions{.block_size = 4, .blocks_per_holder_max = 256, .blocks_max = 256}};
  HolderIndex holder_ = index_.add_holder("");
};

void run_engine_events(std::string_view bytes) {
  IndexSink sink;
  EngineEventDecoder decoder;
  (void)decoder.decode(bytes, sink);
  (void)rank_of_batch(bytes);
  sink.flush();
}

std::vector<std::string> engine_event_seeds() {
  msgpack::sbuffer batch, maps;
  msgpack::packer list(batch), map(maps);
  list.pack_array(3);
  list.pack(1.5);
  list.pack_array(3);
  list.pack_array(7);
  list.pack("BlockStored");
  list.pack(std::vector<std::int64_t>{-5, 6});
  list.pack_nil();
  list.pack(std::vector<int>{1, 2, 3, 4, 5, 600, 70'000, 8});
  list.pack(4);
  list.pack_nil();
  list.pack("GPU");
  list.pack_array(3);
  list.pack("BlockRemoved");
  list.pack(std::vector<int>{6});
  list.pack("cpu");
  list.pack_array(1);
  list.pack("AllBlocksCleared");
  list.pack(0);
  map.pack_array(2);
  map.pack(1.5);
  map.pack_array(1);
  map.pack_map(5);
  map.pack("type"), map.pack("BlockStored");
  map.pack("block_hashes"), map.pack(std::vector<std::vector<char>>{{1, 2, 3, 4, 5, 6, 7, 8, 9}});
  map.pack("parent_block_hash"), map.pack_nil();
  map.pack("token_ids"), map.pack(std::vector<int>{1, 2, 3, 4});
  map.pack("block_size"), map.pack(4);
  return {{batch.data(), batch.size()}, {maps.data(), maps.size()}};
}

// ---- the event log that replicas share ----

void run_event_log(std::string_view bytes) {
  Directory directory;
  scale::LogReader reader(directory, [](const NodeInfo&) { return true; });
  Cutter cutter(bytes);
  for (TimeNs now = kSecond; !cutter.empty(); now += kMillisecond) reader.apply(cutter.part(), now);
}

std::vector<std::string> event_log_seeds() {
  using namespace scale;  // NOLINT(google-build-using-namespace)
  const auto record = [](LogKind kind, std::uint64_t sequence, std::string bytes) {
    return LogRecord{static_cast<std::uint32_t>(kind), "", "b", 1, sequence, std::move(bytes)};
  };
  const auto messages = examples_from_node();
  const std::string entry = encode(
      LogEntry{1,
               "r",
               {record(LogKind::kHello, 0, encoded(messages[0])), record(LogKind::kUpdate, 0, encoded(messages[2])),
                record(LogKind::kUpdate, 1, encoded(messages[3])), record(LogKind::kGone, 0, "")}});
  return {as_part(entry) + as_part(encode(LogEntry{1, "s", {record(LogKind::kHole, 0, "")}})) + as_part(entry)};
}

}  // namespace

const std::vector<Target> kControllerTargets = {
    {"controller_messages", run_controller_messages, controller_message_seeds},
    {"node_reports", run_node_reports, node_report_seeds},
    {"sessions", run_sessions, session_seeds},
    {"client_session", run_client_session, client_session_seeds},
    {"engine_events", run_engine_events, engine_event_seeds},
    {"event_log", run_event_log, event_log_seeds}};

}  // namespace kvferry::fuzz
