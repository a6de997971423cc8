// Fuzz targets for TCP messages over several connections: at the target's end of links, and at the initiator's end.
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <map>

#include "tests/fuzz/target.h"
#include "transport/base/checksum.h"
#include "transport/base/net/tcp_socket.h"
#include "transport/tcp/acceptor.h"
#include "transport/tcp/inbound_link.h"
#include "transport/tcp/tcp_backend.h"

namespace kvferry::fuzz {

using namespace tcp;  // NOLINT(google-build-using-namespace)

namespace {

constexpr std::uint64_t kIncarnation = 1;
const std::string kSecret(16, 's');
constexpr std::size_t kConnections = 3;
constexpr std::uint64_t kRegionBytes = 4096;

std::string hello_of(std::uint64_t link) {
  std::string bytes;
  append_message(bytes, {.kind = MessageKind::kHello, .id = kMagic},
                 encode(Hello{kProtocolVersion, kIncarnation, kSecret, "from", link}));
  return bytes;
}

/// A backend whose loop is never started. It has an acceptor, and a region that the author of an input knows, with a
/// grant whose id is random.
class InboundSide {
 public:
  InboundSide() : acceptor_(backend_, kIncarnation, kSecret, [this](auto& one, auto& hello) { welcome(one, hello); }) {
    const RegionId region = backend_.table().new_region_id();
    backend_.table().add_region(region, {.base = memory_.data(), .bytes = memory_.size()},
                                encode(RegionDescriptor{kIncarnation, 0, kRegionBytes, "", 1, 0, false}));
    KVFERRY_CHECK(backend_.table().add_grant(region, 1024, 512, {}, ""), "no grant");
  }
  ~InboundSide() {
    for (OwnedFd& socket : sockets_) socket = OwnedFd();
    backend_.stop();
  }

  void add_connection() {
    int ends[2];
    KVFERRY_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0, "no socket pair");
    sockets_.emplace_back(ends[0]);
    acceptor_.accept(OwnedFd(ends[1]));
  }
  void send(std::size_t connection, std::string_view bytes) {
    (void)::send(sockets_[connection].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    turn(connection, EPOLLIN);
  }
  void hang_up(std::size_t connection) {
    ::shutdown(sockets_[connection].get(), SHUT_WR);
    turn(connection, EPOLLIN | EPOLLRDHUP);
  }
  void read_answers(std::size_t connection) {
    static char scratch[65536];
    while (::recv(sockets_[connection].get(), scratch, sizeof(scratch), 0) > 0) {
    }
    turn(connection, EPOLLOUT);
  }

 private:
  static constexpr std::uint64_t kFirstTag = 2;  // tag of the backend's first connection

  void turn(std::size_t connection, std::uint32_t events) {
    backend_.on_ready(kFirstTag + connection, events);
    for (int i = 0; i < 100 && backend_.advance(backend_.now()); ++i) {
    }
    over_.clear();
  }
  void welcome(Connection& connection, const Hello& hello) {
    auto& link = links_[hello.link];
    if (link == nullptr)
      link = std::make_unique<InboundLink>(backend_, hello.from,
                                           [this, id = hello.link] { over_.push_back(links_.extract(id)); });
    if (!link->add(connection, std::nullopt)) backend_.close(connection);
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(kRegionBytes);
  TcpBackend backend_{TcpOptions{}};
  std::map<std::uint64_t, std::unique_ptr<InboundLink>> links_;
  std::vector<decltype(links_)::node_type> over_;  // the links that ended in this turn
  Acceptor acceptor_;
  std::vector<OwnedFd> sockets_;
};

/// The first byte says which connections begin with a valid hello, and whether these connections belong to one link.
void run_tcp_requests(std::string_view bytes) {
  InboundSide side;
  Cutter cutter(bytes);
  const std::uint8_t how = cutter.byte();
  for (std::size_t i = 0; i < kConnections; ++i) {
    side.add_connection();
    if ((how >> i & 1) == 0) side.send(i, hello_of((how & 8) == 0 ? 7 : i));
  }
  while (!cutter.empty()) {
    const std::uint8_t what = cutter.byte();
    const std::size_t connection = (what & 0x3f) % kConnections;
    if (what < 0xc0) {
      side.send(connection, cutter.part());
    } else if (what < 0xe0) {
      side.read_answers(connection);
    } else {
      side.hang_up(connection);
    }
  }
}

/// Returns a message with entries and payload.
std::string frame(MessageHeader header, const std::vector<Entry>& entries, std::string_view text = {},
                  std::string_view payload = {}) {
  header.num_entries = static_cast<std::uint32_t>(entries.size());
  header.text_bytes = static_cast<std::uint32_t>(text.size());
  header.payload_bytes = static_cast<std::uint32_t>(payload.size());
  std::string bytes;
  append_bytes(bytes, &header, sizeof(header));
  append_bytes(bytes, entries.data(), entries.size() * sizeof(Entry));
  if ((header.flags & kChecksums) != 0) {
    for (const Entry& entry : entries) {
      const std::uint64_t sum = chunk_checksum(std::as_bytes(std::span(payload)).first(entry.bytes));
      append_bytes(bytes, &sum, sizeof(sum));
    }
  }
  return bytes.append(text).append(payload);
}

std::vector<std::string> tcp_request_seeds() {
  const std::string push = frame({.kind = MessageKind::kPush, .id = 1, .region = 1}, {{0, 4, kEndsRange}}, {}, "abcd");
  const std::string last =
      frame({.kind = MessageKind::kPush, .flags = kFinal | kChecksums, .id = 1, .region = 1, .number = 2},
            {{8, 4, kEndsRange | 1}}, "note", "abcd");
  const std::string granted =
      frame({.kind = MessageKind::kPush, .flags = kFinal, .id = 2, .grant = 1, .region = 1, .number = 1},
            {{508, 4, kEndsRange}}, {}, "abcd");
  const std::string pull = frame({.kind = MessageKind::kPull, .id = 3, .region = 1, .number = 1}, {{0, 4096, 0}});
  const std::string rest = frame({.kind = MessageKind::kCancel, .id = 3}, {}) +
                           frame({.kind = MessageKind::kPing}, {}) +
                           frame({.kind = MessageKind::kNotify, .id = 4}, {}, "note");
  const auto on = [](char connection, std::string_view bytes) { return connection + as_part(bytes); };
  return {'\0' + on(0, push.substr(0, 50)) + on(1, last) + on(0, push.substr(50)) + on(2, granted) + on(1, pull) +
              on(1, rest) + "\xc1\xc0\xe0",
          '\1' + on(0, hello_of(7)) + on(0, pull + rest) + on(1, "GET / HTTP/1.1\r\n\r\n")};
}

// ---- an initiator whose target sends these bytes ----

void run_tcp_answers(std::string_view bytes) {
  static auto& listening = *new net::TcpListener(net::listen_tcp("127.0.0.1", 0).value());
  TcpOptions options;
  options.local_connections = 2;
  TcpBackend backend(options);
  std::vector<std::byte> memory(kRegionBytes);
  const RegionId region = backend.table().new_region_id();
  backend.table().add_region(region, {.base = memory.data(), .bytes = memory.size()}, "");
  const std::string address = encode(Address{kProtocolVersion, kIncarnation, kSecret, {listening.address}});
  const PeerId peer = backend.table().connect(address, kIncarnation).peer;
  backend.add_peer(peer, address);
  std::string remote = encode(RegionDescriptor{kIncarnation, 0, kRegionBytes, "", 1, 0, false});
  for (const Direction direction : {Direction::kPull, Direction::kPush}) {
    PagedTransfer transfer{peer, direction, region, remote, {{0, 0, 1024}, {2048, 2048, 512}}, "note"};
    if (direction == Direction::kPull) transfer.checksums = {1, 2};
    if (auto accepted = backend.table().accept(std::move(transfer))) backend.submit(std::move(*accepted));
  }
  const auto turn = [&] {
    for (std::uint64_t tag = 2; tag < 5; ++tag) backend.on_ready(tag, EPOLLIN | EPOLLOUT);
    for (int i = 0; i < 100 && backend.advance(backend.now()); ++i) {
    }
  };
  std::vector<OwnedFd> sockets;
  const auto accept_all = [&] {
    turn();
    while (OwnedFd socket = net::accept_tcp(listening.socket.get())) sockets.push_back(std::move(socket));
  };
  accept_all();
  for (Cutter cutter(bytes); !cutter.empty() && !sockets.empty();) {
    const std::uint8_t which = cutter.byte();
    const std::string_view part = cutter.part();
    (void)::send(sockets[which % sockets.size()].get(), part.data(), part.size(), MSG_NOSIGNAL);
    accept_all();
  }
  backend.stop();
  KVFERRY_CHECK(backend.table().num_open() == 0, "a transfer without an end");
}

std::vector<std::string> tcp_answer_seeds() {
  const std::string welcome = frame({.kind = MessageKind::kWelcome}, {});
  const std::string data = frame({.kind = MessageKind::kData, .id = 1, .number = 1}, {}, {}, std::string(1536, 'd'));
  const std::string zero = frame({.kind = MessageKind::kData, .id = 1}, {}, {}, std::string(1536, 'd'));
  const std::string refused = frame({.kind = MessageKind::kData, .flags = kRefused, .id = 1, .number = 1}, {}, "no");
  const std::string answer = frame({.kind = MessageKind::kAnswer, .id = 2}, {}, encode(AnswerBody{"bad", {0, 1}}));
  const std::string plain = frame({.kind = MessageKind::kAnswer, .id = 2}, {});
  const auto on = [](char connection, std::string_view bytes) { return connection + as_part(bytes); };
  return {on(0, welcome) + on(1, welcome) + on(0, data.substr(0, 99)) + on(1, answer) + on(0, data.substr(99)),
          on(0, welcome + zero + plain) + on(1, welcome + zero),
          on(0, welcome) + on(0, refused + answer + frame({.kind = MessageKind::kPong}, {})),
          on(0, frame({.kind = MessageKind::kWelcome}, {}, "refused"))};
}

}  // namespace

const std::vector<Target> kTcpTargets = {{"tcp_requests", run_tcp_requests, tcp_request_seeds},
                                         {"tcp_answers", run_tcp_answers, tcp_answer_seeds}};

}  // namespace kvferry::fuzz
