#include "transport/base/net/spare_fd.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <bit>
#include <cerrno>

#include "transport/base/log.h"

namespace kvferry::net {
namespace {

OwnedFd open_something() { return OwnedFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

}  // namespace

SpareFd::SpareFd() : spare_(open_something()) {}

bool SpareFd::refuse(int listener, const char* who) {
  if (errno != EMFILE && errno != ENFILE) return false;
  { const OwnedFd freed = std::move(spare_); }
  const bool is_refused = OwnedFd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC)).get() >= 0;
  spare_ = open_something();
  if (is_refused && std::has_single_bit(++num_refused_))
    log().error("{}: refused a connection ({} so far): no file descriptor is left; raise the limit (ulimit -n)", who,
                num_refused_);
  return is_refused;
}

}  // namespace kvferry::net
