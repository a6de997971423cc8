// Measures the limit of sockets: one TCP connection, over which sendmsg() and recvmsg() move the blocks, with up to
// `call_bytes` bytes per call. The receiver polls, because a sleeping receiver halves the rate and makes a ping four
// times as long.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "launch/bench/harness/interrupt.h"
#include "launch/bench/transfer/engine.h"

namespace kvferry::bench {
namespace {

constexpr std::size_t kSocketRangesMax = 1024;  // IOV_MAX
constexpr int kPollsPerCheck = 10'000;          // polls of an empty socket between two checks of the deadline
constexpr std::size_t kNoteBytes = 16;          // bytes sent after a ping's block, in place of a notification

class SocketEngine final : public Engine {
 public:
  nlohmann::json start(const WorkerSpec& spec, BenchMemory& memory) override {
    memory_ = memory.span();
    side_ = spec.side;
    if (side_ == Side::kInitiator) return nlohmann::json::object();
    listening_ = need(net::listen_tcp(spec.host, 0));
    return {{"host", spec.host}, {"port", listening_.address.port}};
  }

  void connect(const nlohmann::json& peer) override {
    if (side_ == Side::kTarget) return;  // the target accepts the connection in answer() and pong()
    adopt(need(net::connect_tcp({peer.value("host", ""), peer.value("port", std::uint16_t{0})})));
  }

  void prepare(const Job& job, Side side, std::uint64_t call_bytes) override {
    Engine::prepare(job, side, call_bytes);
    call_bytes_ = std::max<std::uint64_t>(call_bytes, 1);
  }

  void transfer() override {
    if (job_.is_push) {
      move_blocks(true);
      move_note(false);
    } else {
      move_note(true);
      move_blocks(false);
    }
  }

  void answer() override {
    accept_once();
    if (job_.is_push) {
      move_blocks(false);
      move_note(true);
    } else {
      move_note(false);
      move_blocks(true);
    }
  }

  void ping() override {
    move_block_and_note(true);
    move_block_and_note(false);
  }
  void pong() override {
    accept_once();
    move_block_and_note(false);
    move_block_and_note(true);
  }

 private:
  void adopt(OwnedFd socket) {
    socket_ = std::move(socket);
    const timeval second{1, 0};  // timeout of send calls, so that a blocked sender checks the deadline
    // The system's congestion control may pace the sender (with BBR the rate falls to a quarter). Reno does not pace,
    // and every process may choose Reno.
    constexpr std::string_view kSimplest = "reno";
    ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_CONGESTION, kSimplest.data(), kSimplest.size());
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &second, sizeof(second));
  }

  void accept_once() {
    if (!socket_) adopt(tcp_accept(listening_, Deadline(kPatience)));
  }

  void move_blocks(bool is_send) {
    ranges_.clear();
    for (const std::uint64_t offset : own_) ranges_.push_back({memory_.data() + offset, job_.block_bytes});
    move_ranges(is_send);
  }
  void move_note(bool is_send) {
    ranges_.assign(1, {note_, 1});
    move_ranges(is_send);
  }
  void move_block_and_note(bool is_send) {
    ranges_.assign({{memory_.data() + own_[0], job_.block_bytes}, {note_, kNoteBytes}});
    move_ranges(is_send);
  }

  void move_ranges(bool is_send) {
    const Deadline deadline(kPatience);
    int num_polls = 0;
    for (std::size_t begin = 0; begin < ranges_.size();) {
      // Takes ranges until they have call_bytes_ bytes, but at most kSocketRangesMax. If they have more bytes, the last
      // range is shortened for the call, and gets its length back after the call.
      std::size_t end = begin;
      std::uint64_t bytes = 0;
      while (end < ranges_.size() && end - begin < kSocketRangesMax && bytes < call_bytes_)
        bytes += ranges_[end++].iov_len;
      const std::uint64_t cut = bytes > call_bytes_ ? bytes - call_bytes_ : 0;
      ranges_[end - 1].iov_len -= cut;
      msghdr message{};
      message.msg_iov = ranges_.data() + begin;
      message.msg_iovlen = end - begin;
      const ssize_t moved =
          is_send ? ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL) : ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
      ranges_[end - 1].iov_len += cut;
      if (moved == 0 && !is_send)
        throw Failure(
            {ErrorCode::kPeerLost, "the other side has closed the TCP connection that the benchmark measures"});
      if (moved < 0 && errno != EINTR && errno != EAGAIN)
        throw Failure({ErrorCode::kPeerLost,
                       fmt::format("the TCP connection that the benchmark measures failed: {}", std::strerror(errno))});
      if (moved < 0) {
        if (!is_send && ++num_polls % kPollsPerCheck != 0) continue;
        need(deadline.check(is_send ? "an acknowledgement on the measured TCP connection"
                                    : "data on the measured TCP connection"));
        continue;
      }
      for (auto left = static_cast<std::uint64_t>(moved); left > 0;) {
        iovec& range = ranges_[begin];
        const std::uint64_t part = std::min<std::uint64_t>(left, range.iov_len);
        range = {static_cast<std::byte*>(range.iov_base) + part, range.iov_len - part};
        left -= part;
        if (range.iov_len == 0) ++begin;
      }
    }
  }

  std::span<std::byte> memory_;
  Side side_ = Side::kInitiator;
  net::TcpListener listening_;
  OwnedFd socket_;
  std::uint64_t call_bytes_ = 1;
  std::vector<iovec> ranges_;
  char note_[kNoteBytes] = {};
};

}  // namespace

std::unique_ptr<Engine> make_socket_engine() { return std::make_unique<SocketEngine>(); }

}  // namespace kvferry::bench
