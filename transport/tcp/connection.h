// One socket: frames in, straight into the memory that their handler names, and frames out, straight from memory.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/base/clock.h"
#include "transport/loan.h"
#include "transport/tcp/frames.h"
#include "transport/tcp/socket.h"

namespace kvferry::tcp {

class Connection;

/// What goes out: the head, and payload from wherever it lies.
struct OutFrame {
  std::string head;
  std::vector<iovec> parts;    // the first is the head's place
  std::uint64_t transfer = 0;  // of the initiator, whose payload it is; 0: nobody's
  Loan loan;                   // of the memory, until it is sent
};

/// The two ends of a link, and who greets newcomers. Everything is called in the loop. A handler may close the
/// connection, or break it, within any of the calls.
class FrameHandler {
 public:
  virtual ~FrameHandler() = default;
  virtual void on_connected(Connection& connection) = 0;
  /// Says where the payload goes: add_sink() for all of it, or drop_payload(). An error breaks the connection.
  virtual Result<void> on_head(Connection& connection, const FrameHead& head) = 0;
  /// Only after want_pieces(): bytes of the sink's part `part` have come, the last ones of it with `ends`.
  virtual void on_piece(Connection& connection, std::size_t part, std::span<const std::byte> bytes, bool ends) = 0;
  /// The frame is in, also one without payload.
  virtual Result<void> on_frame(Connection& connection) = 0;
  /// Appends a head to what goes out, and parts. False: nothing to send now.
  virtual bool next_frame(Connection& connection, OutFrame& out) = 0;
  virtual void on_broken(Connection& connection, const std::string& why) = 0;
};

/// Never blocks. Edge-triggered: is_readable and is_writable hold until a call has found the opposite.
class Connection {
 public:
  Connection(std::uint64_t id, OwnedFd socket, FrameHandler& handler, bool is_connecting, TimeNs now);

  std::uint64_t id() const { return id_; }
  int fd() const { return socket_.get(); }
  bool is_closed() const { return socket_.get() < 0; }
  bool is_connecting() const { return is_connecting_; }
  FrameHandler& handler() { return *handler_; }
  void set_handler(FrameHandler& handler) { handler_ = &handler; }
  /// The handler's number for it.
  std::size_t lane() const { return lane_; }
  void set_lane(std::size_t lane) { lane_ = lane; }
  /// Until a stranger is known, texts are short.
  void trust() { text_bytes_max_ = kAnswerBytesMax; }

  /// The engine's mark that it waits for its turn; true: it was not set before.
  bool mark_queued(bool is_queued) { return std::exchange(is_queued_, is_queued) != is_queued; }
  void on_ready(std::uint32_t epoll_events);
  /// Does a bounded piece of work; true: there is more to do at once.
  bool advance(TimeNs now);
  /// Sends what there is, frame by frame until `bytes_max` are sent; true: it stopped for that.
  bool flush(std::uint64_t bytes_max);
  /// Sent before any further frame of the handler's.
  void send(const FrameHeader& header, std::string_view text = {}) { append_frame(control_, header, text); }

  /// Within on_head().
  void add_sink(std::byte* to, std::uint64_t bytes) { sink_.push_back({to, bytes}); }
  void want_pieces() { wants_pieces_ = true; }
  void hold(Loan loan) { in_loan_ = std::move(loan); }
  /// The rest of the payload that is coming in is read and forgotten.
  void drop_payload();
  /// The rest of the payload of this transfer's frame is sent as zeros, for its memory is wanted back.
  void scrap_payload(std::uint64_t transfer);

  /// Tells the handler.
  void fail(const std::string& why);
  /// Tells nobody; gives back what was lent to it.
  void close();

  /// A frame is half here, or something has not left.
  bool is_in_the_middle() const { return payload_left_ > 0 || begin_ < end_ || out_left_ > 0 || !control_.empty(); }
  /// When the peer showed last that it lives; looks at the socket as well.
  TimeNs alive_at(TimeNs now);
  void forgive(TimeNs now) { alive_at_ = now; }

 private:
  void receive(TimeNs now);
  void parse();
  bool parse_head();
  void take(std::uint64_t bytes);
  bool load_frame();

  const std::uint64_t id_;
  OwnedFd socket_;
  FrameHandler* handler_;
  std::size_t lane_ = 0;
  bool is_connecting_;
  bool is_queued_ = false;
  bool is_readable_ = true;
  bool is_writable_ = true;
  bool is_hung_up_ = false;
  std::uint32_t text_bytes_max_ = kHelloBytesMax;

  std::vector<std::byte> buffer_;  // [begin_, end_) was read ahead and is not parsed yet
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  std::size_t wanted_ = sizeof(FrameHeader);
  std::vector<iovec> sink_;  // what of the payload is still to come goes here
  std::size_t sink_at_ = 0;
  std::uint64_t payload_left_ = 0;
  bool is_in_frame_ = false;
  bool is_dropping_ = false;
  bool wants_pieces_ = false;
  Loan in_loan_;

  std::string control_;
  OutFrame out_;
  std::size_t out_at_ = 0;
  std::uint64_t out_left_ = 0;

  TimeNs alive_at_;
  std::uint64_t num_sent_ = 0;
  std::uint64_t num_acknowledged_ = 0;
};

}  // namespace kvferry::tcp
