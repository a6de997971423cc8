// Over 300 lines, because receiving and sending share the socket's state and the functions that step through an iovec.
#include "transport/tcp/connection.h"

#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace kvferry::tcp {
namespace {

constexpr std::uint64_t kTurnBytes = 2 << 20;  // a connection's turn ends after about this many bytes in each direction
// Room in the receive buffer beyond the message that is awaited, enough for a small message. Payload that arrives in
// this buffer must be copied once more.
constexpr std::size_t kReadAheadBytes = 6 << 10;
constexpr std::size_t kHeadsBytes = 64 << 10;  // messages without payload are joined up to about this size
// Limit on the bytes that send() has queued, such as answers. When it is reached, because the peer does not read,
// nothing more is received from the peer.
constexpr std::size_t kControlBytesMax = 4 << 20;
// This many newly acknowledged bytes count as a sign that the peer's process runs. Fewer do not, because they may be
// pings, which the kernel of a stopped process acknowledges too.
constexpr std::uint64_t kSignOfLifeBytes = 4 << 10;
constexpr std::size_t kScratchBytes = 256 << 10;

/// Returns memory for dropped payload, which is written there and never read.
std::byte* scratch() {
  static thread_local std::vector<std::byte> memory(kScratchBytes);
  return memory.data();
}
std::byte* zeros() {
  static std::vector<std::byte> memory(kScratchBytes);
  return memory.data();
}

std::string broken_by(int code) { return fmt::format("the connection broke: {}", std::strerror(code)); }

/// Returns the number of sent bytes that the peer's host has not acknowledged.
std::uint64_t unacknowledged_bytes(int fd) {
  int bytes = 0;
  return ::ioctl(fd, SIOCOUTQ, &bytes) == 0 && bytes > 0 ? static_cast<std::uint64_t>(bytes) : 0;
}

/// Skips the first `bytes` bytes of parts[at...]: advances `at` and shrinks entries in place.
void skip(std::vector<iovec>& parts, std::size_t& at, std::uint64_t bytes) {
  while (bytes > 0) {
    iovec& part = parts[at];
    if (part.iov_len > bytes) {
      part.iov_base = static_cast<std::byte*>(part.iov_base) + bytes;
      part.iov_len -= bytes;
      return;
    }
    bytes -= part.iov_len;
    part.iov_len = 0;
    ++at;
  }
}

}  // namespace

void skip_congestion_control_within_host(int fd) {
  constexpr std::string_view kSimplest = "reno";  // any process may select this algorithm
  if (is_same_host(fd)) ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kSimplest.data(), kSimplest.size());
}

Connection::Connection(std::uint64_t id, OwnedFd socket, MessageHandler& handler, bool is_connecting, TimeNs now)
    : id_(id), socket_(std::move(socket)), handler_(&handler), is_connecting_(is_connecting), alive_at_(now) {
  if (is_connecting) is_readable_ = is_writable_ = false;
}

void Connection::on_ready(std::uint32_t epoll_events) {
  if ((epoll_events & EPOLLOUT) != 0) is_writable_ = true;
  if ((epoll_events & EPOLLIN) != 0) is_readable_ = true;
  if ((epoll_events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) is_hung_up_ = is_readable_ = is_writable_ = true;
}

bool Connection::advance(TimeNs now) {
  if (is_connecting_) {
    if (!is_writable_) return false;
    if (const std::string error = net::connect_error(fd()); !error.empty()) {
      fail("cannot connect: " + error);
      return false;
    }
    is_connecting_ = false;
    alive_at_ = now;
    if (!is_shaking_hands_) handler_->on_connected(*this);
  }
  if (is_shaking_hands_ && !shake_hands()) return false;
  receive(now);
  const bool has_more = flush(kTurnBytes);
  return !is_closed() && (has_more || (is_readable_ && control_.size() < kControlBytesMax));
}

bool Connection::shake_hands() {
  const Result<bool> is_done = tls_->handshake();
  if (!is_done) {
    fail(is_done.error().what);
    return false;
  }
  if (!*is_done) return false;
  is_shaking_hands_ = false;
  if (!tls_->encrypts()) {
    key_name_ = tls_->key_name();
    tls_.reset();
  }
  handler_->on_connected(*this);
  return !is_closed();
}

ssize_t Connection::read_some(msghdr& message) {
  return tls_ == nullptr ? ::recvmsg(fd(), &message, 0) : tls_->receive({message.msg_iov, message.msg_iovlen});
}

ssize_t Connection::write_some(msghdr& message) {
  return tls_ == nullptr ? ::sendmsg(fd(), &message, MSG_NOSIGNAL) : tls_->send({message.msg_iov, message.msg_iovlen});
}

void Connection::receive(TimeNs now) {
  std::uint64_t budget = kTurnBytes;
  while (!is_closed() && is_readable_ && budget > 0 && control_.size() < kControlBytesMax) {
    if (begin_ > 0) {
      std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
      end_ -= std::exchange(begin_, 0);
    }
    const std::size_t room = std::max(wanted_, end_) + kReadAheadBytes;
    if (buffer_.size() < room) buffer_.resize(room);
    // One call reads the payload and the bytes that follow it, so that small messages cost one call.
    msghdr message{};
    std::array<iovec, 2> drop;
    std::uint64_t asked = 0;
    if (is_dropping_ && payload_left_ > 0) {
      drop[0] = {scratch(), std::min<std::uint64_t>(payload_left_, kScratchBytes)};
      drop[1] = {buffer_.data(), room};
      message.msg_iov = drop.data();
      message.msg_iovlen = drop[0].iov_len == payload_left_ ? 2 : 1;
      asked = drop[0].iov_len + (message.msg_iovlen == 2 ? room : 0);
    } else {
      sink_.push_back({buffer_.data() + end_, room - end_});
      message.msg_iov = sink_.data() + sink_at_;
      message.msg_iovlen = sink_.size() - sink_at_;
      asked = payload_left_ + room - end_;
    }
    const ssize_t got = read_some(message);
    if (!(is_dropping_ && payload_left_ > 0)) sink_.pop_back();
    if (got <= 0) {
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) {
        is_readable_ = false;
      } else {
        fail(got == 0 ? "the peer closed the connection" : broken_by(errno));
      }
      return;
    }
    const auto bytes = static_cast<std::uint64_t>(got);
    alive_at_ = now;
    budget -= std::min(budget, bytes);
    // A short read has emptied the socket, unless the peer has hung up: then the end of the stream is still to be read.
    if (bytes < asked && !is_hung_up_) is_readable_ = false;
    const std::uint64_t to_payload = std::min(bytes, payload_left_);
    end_ += bytes - to_payload;
    if (to_payload > 0) accept_payload(to_payload);
    parse();
  }
}

void Connection::accept_payload(std::uint64_t bytes) {
  payload_left_ -= bytes;
  if (is_dropping_) return;
  if (!wants_pieces_) return skip(sink_, sink_at_, bytes);
  while (bytes > 0 && !is_dropping_) {
    iovec& part = sink_[sink_at_];
    const std::size_t length = std::min<std::uint64_t>(bytes, part.iov_len);
    auto* first = static_cast<std::byte*>(part.iov_base);
    const bool ends = length == part.iov_len;
    const std::size_t index = sink_at_;
    skip(sink_, sink_at_, length);
    bytes -= length;
    handler_->on_piece(*this, index, {first, length}, ends);
  }
}

void Connection::parse() {
  while (!is_closed()) {
    if (payload_left_ > 0) {
      std::uint64_t ready = std::min<std::uint64_t>(payload_left_, end_ - begin_);
      while (ready > 0 && !is_closed()) {
        const std::uint64_t length = is_dropping_ ? ready : std::min<std::uint64_t>(ready, sink_[sink_at_].iov_len);
        if (!is_dropping_) std::memcpy(sink_[sink_at_].iov_base, buffer_.data() + begin_, length);
        begin_ += length;
        ready -= length;
        accept_payload(length);
      }
      if (payload_left_ > 0 || is_closed()) return;
    }
    if (is_in_message_) {
      is_in_message_ = false;
      in_access_.end();
      if (Result<void> ok = handler_->on_message_end(*this); !ok) return fail(ok.error().what);
      continue;
    }
    if (!parse_head()) return;
  }
}

bool Connection::parse_head() {
  wanted_ = sizeof(MessageHeader);
  if (end_ - begin_ < wanted_) return false;
  MessageHead head;
  std::memcpy(&head.header, buffer_.data() + begin_, sizeof(MessageHeader));
  const MessageHeader& header = head.header;
  if (header.num_entries > kEntriesMax || header.text_bytes > text_bytes_max_ || header.payload_bytes > kPayloadMax ||
      header.priority > 2) {
    fail(fmt::format(
        "the peer sent a message of kind {} with {} entries, {} bytes of text, {} of payload and priority {}; "
        "at most {}, {}, {} and 2 are allowed",
        static_cast<int>(header.kind), header.num_entries, header.text_bytes, header.payload_bytes, header.priority,
        kEntriesMax, text_bytes_max_, kPayloadMax));
    return false;
  }
  wanted_ = head_bytes(header);
  if (end_ - begin_ < wanted_) return false;
  head.entries = buffer_.data() + begin_ + sizeof(MessageHeader);
  begin_ += std::exchange(wanted_, sizeof(MessageHeader));
  is_in_message_ = true;
  is_dropping_ = wants_pieces_ = false;
  payload_left_ = header.payload_bytes;
  sink_.clear();
  sink_at_ = 0;
  if (Result<void> ok = handler_->on_head(*this, head); !ok) {
    fail(ok.error().what);
    return false;
  }
  return true;
}

void Connection::drop_payload() {
  is_dropping_ = true;
  in_access_.end();
  sink_.clear();
  sink_at_ = 0;
}

bool Connection::load_message() {
  out_.head.clear();
  out_.parts.assign(1, iovec{});
  out_.transfer = 0;
  out_at_ = 0;
  do {
    out_.head += std::exchange(control_, {});
  } while (out_.parts.size() == 1 && out_.head.size() < kHeadsBytes && !is_closed() &&
           handler_->next_message(*this, out_));
  // What send() has queued is appended here only if there is no payload, because payload must directly follow its head.
  if (out_.parts.size() == 1) out_.head += std::exchange(control_, {});
  out_.parts[0] = {out_.head.data(), out_.head.size()};
  out_left_ = 0;
  for (const iovec& part : out_.parts) out_left_ += part.iov_len;
  return out_left_ > 0;
}

bool Connection::flush(std::uint64_t bytes_max) {
  std::uint64_t sent = 0;
  while (!is_closed() && is_writable_ && !is_connecting_ && !is_shaking_hands_) {
    if (out_left_ == 0 && !has_unsent()) {
      if (sent >= bytes_max && control_.empty()) return true;
      if (!load_message() || is_closed()) return false;
    }
    msghdr message{};
    message.msg_iov = out_.parts.data() + out_at_;
    message.msg_iovlen = out_.parts.size() - out_at_;
    const ssize_t got = write_some(message);
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) {
        is_writable_ = false;
      } else {
        fail(broken_by(errno));
      }
      return false;
    }
    const auto bytes = static_cast<std::uint64_t>(got);
    sent += bytes;
    num_sent_ += bytes;
    out_left_ -= bytes;
    skip(out_.parts, out_at_, bytes);
    if (out_left_ == 0) {
      out_.transfer = 0;
      out_.access.end();
    }
  }
  return false;
}

void Connection::send_zeros_for(std::uint64_t transfer) {
  if (out_left_ == 0 || out_.transfer != transfer) return;
  out_.transfer = 0;
  out_.access.end();
  std::uint64_t payload = 0;
  for (std::size_t part = std::max<std::size_t>(out_at_, 1); part < out_.parts.size(); ++part)
    payload += out_.parts[part].iov_len;
  out_.parts.resize(1);  // drops the payload's parts and keeps the head, whether the head was sent or not
  for (; payload > 0; payload -= out_.parts.back().iov_len)
    out_.parts.push_back({zeros(), std::min<std::uint64_t>(payload, kScratchBytes)});
  if (out_at_ > 1) out_at_ = 1;
}

void Connection::fail(const std::string& why) {
  if (!is_closed()) handler_->on_broken(*this, why);
}

void Connection::close() {
  tls_.reset();
  socket_ = OwnedFd();
  in_access_.end();
  out_.access.end();
  payload_left_ = out_left_ = 0;
  begin_ = end_ = 0;
  control_.clear();
}

TimeNs Connection::alive_at(TimeNs now) {
  if (is_closed() || is_connecting_) return alive_at_;
  const std::uint64_t acknowledged = num_sent_ - std::min(unacknowledged_bytes(fd()), num_sent_);
  if (acknowledged >= std::exchange(num_acknowledged_, acknowledged) + kSignOfLifeBytes) alive_at_ = now;
  return alive_at_;
}

}  // namespace kvferry::tcp
