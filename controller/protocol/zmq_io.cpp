#include "controller/protocol/zmq_io.h"

#include "controller/protocol/wire.h"

namespace kvferry::controller {

void set_common_options(zmq::socket_t& socket, std::string_view endpoint) {
  socket.set(zmq::sockopt::maxmsgsize, static_cast<std::int64_t>(wire::kMessageBytesMax));
  socket.set(zmq::sockopt::linger, 0);
  socket.set(zmq::sockopt::ipv6, endpoint.find('[') != std::string_view::npos);
  // ZMQ_HEARTBEAT_IVL stays off: with a full receive queue a lost connection then ends the process by an assertion
  // (libzmq issues 3937, 4364, 4767). Our own heartbeats tell the living from the dead; keepalive frees dead sockets.
  socket.set(zmq::sockopt::tcp_keepalive, 1);
  socket.set(zmq::sockopt::tcp_keepalive_idle, 10);
  socket.set(zmq::sockopt::tcp_keepalive_intvl, 5);
  socket.set(zmq::sockopt::tcp_keepalive_cnt, 3);
}

bool try_send(zmq::socket_t& socket, std::string_view bytes, zmq::send_flags more) {
  try {
    return socket.send(zmq::buffer(bytes), zmq::send_flags::dontwait | more).has_value();
  } catch (const zmq::error_t&) {
    return false;  // EHOSTUNREACH: the peer of a ROUTER is gone
  }
}

std::size_t try_receive(zmq::socket_t& socket, zmq::message_t* frames, std::size_t num_frames_max) {
  try {
    std::size_t num_frames = 0;
    zmq::message_t beyond;
    do {
      zmq::message_t& frame = num_frames < num_frames_max ? frames[num_frames] : beyond;
      if (!socket.recv(frame, zmq::recv_flags::dontwait)) return 0;
      ++num_frames;
    } while (socket.get(zmq::sockopt::rcvmore));
    return num_frames;
  } catch (const zmq::error_t&) {
    return 0;
  }
}

}  // namespace kvferry::controller
