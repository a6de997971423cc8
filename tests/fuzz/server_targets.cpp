// Fuzz targets for everything that a controller reads from sockets, files and other services.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>

#include "controller/client/client_link.h"
#include "controller/directory/directory_state.h"
#include "controller/engines/engine_directory.h"
#include "controller/http/http_access.h"
#include "controller/http/http_api.h"
#include "controller/http/http_framing.h"
#include "controller/http/http_listener.h"
#include "controller/protocol/stream_socket.h"
#include "controller/scale/etcd_messages.h"
#include "controller/scale/shared_record.h"
#include "controller/server/node_listeners.h"
#include "controller/state/batches.h"
#include "controller/state/records.h"
#include "tests/controller/fixtures.h"
#include "tests/fuzz/examples.h"
#include "tests/fuzz/target.h"

namespace kvferry::fuzz {

using namespace controller;  // NOLINT(google-build-using-namespace)

namespace {

// ---- state files: the first byte chooses a whole file, or a body to which the right checksum is added ----

void run_state_files(std::string_view bytes) {
  Cutter cutter(bytes);
  const bool is_body = cutter.byte() % 2 == 1;
  std::string file(cutter.rest());
  if (is_body) {
    std::string batch;
    begin_batch(batch);
    batch += file;
    end_batch(batch);
    file = batch + batch;  // the batch twice, because records are idempotent
  }
  Directory directory;
  DirectoryState state(directory);
  Replayer replayer(state);
  const BatchScan scan = scan_batches(file, [&](std::string_view body) {
    (void)head_in(body);
    return replayer.replay(body);
  });
  KVFERRY_CHECK(scan.good_bytes <= file.size(), "more batches than bytes");
  state.end_blocks();
  state.finish(kSecond);
  (void)state.image();
}

std::vector<std::string> state_file_seeds() {
  std::string log, snapshot, batch;
  append_head(log, {.kind = "log", .number = 1});
  append_joined(log, NodeId{1}, node_info("b"), 0);
  append_published(log, NodeId{1}, 0, SnapshotMark::kReplaces, Tier::kHost, full_chunks(0, 2), false);
  append_published(log, NodeId{1}, 1, SnapshotMark::kNone, Tier::kHost, std::vector{tail_chunk(5, 6)}, true);
  append_evicted(log, NodeId{1}, 2, keys_of(0, 1));
  append_snapshot_dropped(log, NodeId{1});
  append_gone(log, NodeId{1});
  append_head(snapshot, {.kind = "snapshot", .number = 2});
  Directory directory;
  DirectoryState state(directory);
  state.replay_joined(NodeId{1}, node_info("b"), 0);
  state.replay_published(NodeId{1}, 0, SnapshotMark::kReplaces, Tier::kHost, full_chunks(0, 3), false);
  DirectoryImage image = state.image();
  append_image(snapshot, image);
  image.nodes.push_back(image.nodes.at(0));
  image.nodes.back().info.engine_id.value = "c";
  append_image(snapshot, image);
  state.begin_walk();
  TableBlock block;
  for (std::string name_space; state.walk(block, name_space);) append_block(snapshot, name_space, block);
  state.end_walk();
  append_end(snapshot);
  begin_batch(batch);
  batch += log;
  end_batch(batch);
  return {std::string(1, '\0') + batch + batch, "\1" + log, "\1" + snapshot};
}

// ---- streams: bytes over Unix sockets, from nodes to a controller and in the other direction ----

/// A folder for sockets. It is removed when the process ends.
class SocketFolder {
 public:
  SocketFolder() { std::filesystem::create_directories(path_); }
  ~SocketFolder() { std::filesystem::remove_all(path_); }
  std::string socket(const std::string& name) const { return path_ / name; }

 private:
  const std::filesystem::path path_ = fmt::format("/tmp/kvferry-fuzz-{}", ::getpid());
};

const SocketFolder& folder() {
  static const SocketFolder made;
  return made;
}

/// The listener of a controller, with the controller's sessions.
struct StreamServer {
  std::string path = folder().socket("controller");
  SteadyClock clock;
  Sessions sessions{{}, 0};
  std::unique_ptr<BoundListener> listener = listen_stream("unix://" + path, sessions, clock).value();
  TimeNs now = kSecond;
};

OwnedFd connect_unix(const std::string& path) { return begin_connect(StreamAddress{.path = path}).value(); }

void write_all(int socket, std::string_view bytes) { (void)::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL); }

/// Sends the input over two connections. The first byte of each part chooses the connection.
void run_stream_frames(std::string_view bytes) {
  static auto& server = *new StreamServer;
  std::vector<OwnedFd> sockets;
  for (int i = 0; i < 2; ++i) sockets.push_back(connect_unix(server.path));
  Cutter cutter(bytes);
  while (!cutter.empty()) {
    const std::uint8_t which = cutter.byte();
    write_all(sockets[which % 2].get(), cutter.part());
    server.listener->serve(server.now += kMillisecond);
  }
  sockets.clear();
  while (server.listener->serve(server.now += kMillisecond)) {
  }
  server.sessions.expire(server.now += 3 * kSecond);
}

std::vector<std::string> stream_frame_seeds() {
  std::string all;
  for (const auto& message : examples_from_node()) {
    std::string frame;
    append_frame(frame, encoded(message));
    all += '\0' + as_part(frame.substr(0, 7)) + '\0' + as_part(frame.substr(7)) + '\1' + as_part(frame + frame);
  }
  return {all, '\1' + as_part("\xff\xff\xff\x7f hello")};
}

/// Connects a node to a stream, over which the controller sends these bytes.
void run_stream_answers(std::string_view bytes) {
  static const std::string path = folder().socket("node");
  static const BoundSocket& bound = *new BoundSocket(listen_on(StreamAddress{.path = path}).value());
  const auto link = make_stream_link("unix://" + path, {}).value();
  link->process(kSecond);
  const OwnedFd controller(::accept4(bound.socket.get(), nullptr, nullptr, SOCK_CLOEXEC));
  Cutter cutter(bytes);
  while (!cutter.empty()) {
    write_all(controller.get(), cutter.part());
    link->process(2 * kSecond);
    while (link->receive()) {
    }
  }
}

std::vector<std::string> stream_answer_seeds() {
  std::string all;
  for (const auto& message : examples_from_controller()) {
    std::string frame;
    append_frame(frame, encoded(message));
    all += as_part(frame.substr(0, 5)) + as_part(frame.substr(5));
  }
  return {all};
}

// ---- HTTP: method, path and body of a request; cpp-httplib itself parses the request ----

struct HttpParts {
  Sessions sessions{{}, 0};
  EngineDirectory engines{EngineIndexOptions{}};
  std::unique_ptr<EngineEventsListener> events = EngineEventsListener::make(engines);
  HttpApi api{{sessions, engines, *events, "tcp://127.0.0.1:1"}, [](const auto& work) {
                work(kSecond);
                return Result<void>{};
              }};
};

void run_http(std::string_view bytes) {
  static auto& parts = *new HttpParts;
  Cutter cutter(bytes);
  const std::string path = "/" + std::string(cutter.part());
  // This path is left out, because a registered engine would make the controller connect to an endpoint of the fuzzer's
  // choice.
  if (path == "/register") return;
  const std::string body(cutter.rest());
  const HttpAnswer answer = parts.api.answer("POST", path, body);
  KVFERRY_CHECK(answer.status >= 200 && answer.status <= 503 && answer.status != 500, "{}", answer.body);
  (void)parts.api.answer("GET", path, "");
  static const HttpAccess access(net::ClusterKey(std::string(32, 'k')));
  for (const char* kind : {"Bearer ", "Basic "})
    KVFERRY_CHECK(path == "/healthz" || access.refusal("GET", path, kind + body), "{}", body);
}

std::vector<std::string> http_seeds() {
  std::vector<std::string> seeds = {as_part("metrics"), as_part("nodes"), as_part("status"), as_part("")};
  for (const char* body :
       {R"({"model": "m", "token_ids": [1, 2, 3, 4000000000], "block_size": 16, "lora_id": 3, "cache_salt": "s"})",
        R"({"model": "m", "block_hashes": [1, -2, "3"], "instance_id": "i", "tenant": "t"})",
        R"({"tokens": [1, 2], "prompt_tokens": 5, "exclude": ["a"], "name_space": "x"})",
        R"({"instance_id": "i", "model_name": "m", "dp_rank": 0})"})
    for (const char* path : {"query", "query_by_hash", "score", "pair", "unregister"})
      seeds.push_back(as_part(path) + body);
  return seeds;
}

// ---- where HTTP requests end: the first two bytes say how much of the rest arrives first ----

void run_http_framing(std::string_view bytes) {
  using State = HttpFraming::State;
  Cutter cutter(bytes);
  const std::size_t low = cutter.byte(), num_first = low | std::size_t{cutter.byte()} << 8;
  const std::string_view request = cutter.rest();
  HttpFraming at_once, in_parts;
  const State expected = at_once.read(request);
  State state = in_parts.read(request.substr(0, num_first));
  if (state == State::kIncomplete) state = in_parts.read(request);
  KVFERRY_CHECK(state == expected && in_parts.authorization() == at_once.authorization(), "parts: {}", num_first);
  KVFERRY_CHECK(state != State::kComplete || (in_parts.size() == at_once.size() && at_once.size() <= request.size()),
                "parts: {}", num_first);
}

std::vector<std::string> http_framing_seeds() {
  std::vector<std::string> seeds;
  for (const char* request :
       {"GET /nodes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer abc\r\n\r\nGET / HTTP/1.1\r\n\r\n",
        "POST /pair HTTP/1.1\r\ncontent-length: 4\r\nExpect: 100-continue\r\n\r\nbody",
        "POST /pair HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n4;x=y\r\nbody\r\n0\r\nA: b\r\n\r\n"})
    seeds.push_back(std::string{'\x14', '\0'} + request);
  return seeds;
}

// ---- the replies of etcd ----

void run_etcd(std::string_view bytes) {
  using namespace scale;  // NOLINT(google-build-using-namespace)
  for (const EtcdRequest& request : {EtcdRequest(EtcdGrant{5}), EtcdRequest(EtcdKeepAlive{1}),
                                     EtcdRequest(EtcdRevoke{1}), EtcdRequest(EtcdPut{}), EtcdRequest(EtcdErase{})})
    (void)reply_of(request, bytes);
  (void)all_of(bytes);
  (void)token_of(bytes);
  (void)watch_line_of(bytes);
  (void)record_fields_of(bytes);
}

std::vector<std::string> etcd_seeds() {
  const std::string pair = R"({"key":"a2V5","value":"dmFsdWU=","mod_revision":"7","lease":"3"})";
  return {
      R"({"header":{"revision":"9"},"ID":"5","TTL":"10"})",
      R"({"result":{"header":{"revision":"9"},"ID":"5","TTL":"10"}})",
      R"({"header":{"revision":"9"},"succeeded":true,"responses":[{"response_range":{"kvs":[)" + pair + "]}}]}",
      R"({"header":{"revision":"9"},"kvs":[)" + pair + R"(],"count":"1"})",
      R"({"result":{"header":{"revision":"9"},"events":[{"type":"DELETE","kv":)" + pair + R"(},{"kv":)" + pair + "}]}}",
      R"({"result":{"canceled":true,"compact_revision":"4","cancel_reason":"no leader"}})",
      R"({"error":"etcdserver: requested lease not found","code":5})",
      R"({"token":"abc"})"};
}

}  // namespace

const std::vector<Target> kServerTargets = {{"state_files", run_state_files, state_file_seeds},
                                            {"stream_frames", run_stream_frames, stream_frame_seeds},
                                            {"stream_answers", run_stream_answers, stream_answer_seeds},
                                            {"http", run_http, http_seeds},
                                            {"http_framing", run_http_framing, http_framing_seeds},
                                            {"etcd", run_etcd, etcd_seeds}};

}  // namespace kvferry::fuzz
