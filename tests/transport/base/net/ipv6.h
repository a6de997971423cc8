// Skips tests over IPv6 on hosts that have none.
#pragma once

#include <gtest/gtest.h>

#include "transport/base/net/tcp_socket.h"

#define SKIP_WITHOUT_IPV6() \
  if (!::kvferry::net::listen_tcp("::1", 0)) GTEST_SKIP() << "this host has no IPv6"
