// What all ZeroMQ sockets here share. Private to controller/*.cpp.
#pragma once

#include <string>
#include <string_view>
#include <zmq.hpp>

namespace kvferry::controller {

/// Limits that hold for every socket here.
void set_common_options(zmq::socket_t& socket, std::string_view endpoint);

/// False: no room or no connection; the message is dropped. Never blocks, never throws.
bool try_send(zmq::socket_t& socket, std::string_view bytes, zmq::send_flags more = zmq::send_flags::none);

/// One whole message of up to `frames.size()` frames, or none waiting. Never blocks, never throws.
/// The count tells how many frames came in truth; those that didn't fit are gone.
std::size_t try_receive(zmq::socket_t& socket, zmq::message_t* frames, std::size_t num_frames_max);

}  // namespace kvferry::controller
