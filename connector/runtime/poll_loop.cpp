#include "connector/runtime/poll_loop.h"

#include <pthread.h>

#include <utility>

namespace kvferry {

void PollLoop::start(Turn turn, IsDue is_due) {
  thread_ = std::thread([this, turn = std::move(turn), is_due = std::move(is_due)] {
    ::pthread_setname_np(::pthread_self(), "kvferry-node");
    std::vector<pollfd> fds;
    while (!stopping_) {
      wake_.clear();
      fds.assign(1, {wake_.fd(), POLLIN, 0});
      const int wait_ms = turn(fds);
      while (wait_ms > 0 && ::poll(fds.data(), fds.size(), wait_ms) == 0 && !stopping_ && !is_due()) {
      }
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
