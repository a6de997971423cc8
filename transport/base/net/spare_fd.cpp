#include "transport/base/net/spare_fd.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
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
    log().error(
        "{}: refused a connection ({} so far): no file descriptor is left; raise the limit of this process (ulimit -n) "
        "or of the machine (fs.file-max)",
        who, num_refused_);
  return is_refused;
}

void FdReserve::accepted(int fd, const std::string& who) {
  constexpr rlim_t kReserveMax = 64;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t reserve = std::clamp(limit.rlim_cur / 8, rlim_t{1}, kReserveMax);
  if (static_cast<rlim_t>(fd) + reserve < limit.rlim_cur) return;
  ::shutdown(fd, SHUT_RDWR);
  if (std::has_single_bit(++num_refused_))
    log().error(
        "{}: refused a connection ({} so far): at most {} file descriptors are left; raise the limit (ulimit -n)", who,
        num_refused_, reserve);
}

}  // namespace kvferry::net
