#include "connector/runtime/poll_loop.h"

#include <utility>

namespace kvferry {

void PollLoop::start(Turn turn) {
  thread_ = std::thread([this, turn = std::move(turn)] {
    std::vector<pollfd> fds;
    while (!stopping_) {
      wake_.clear();
      fds.assign(1, {wake_.fd(), POLLIN, 0});
      const int wait_ms = turn(fds);
      if (wait_ms > 0) ::poll(fds.data(), fds.size(), wait_ms);
    }
  });
}

void PollLoop::stop() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  wake_.set();
  thread_.join();
}

}  // namespace kvferry
