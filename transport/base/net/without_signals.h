// Starts threads that handle no signals.
#pragma once

#include <pthread.h>

#include <csignal>
#include <thread>
#include <utility>

namespace kvferry {

/// Starts a thread that blocks all signals, so that the program's other threads handle them.
template <class Body>
std::thread start_without_signals(Body body) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread started(std::move(body));
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

}  // namespace kvferry
