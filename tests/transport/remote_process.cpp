// The other process of the tests. Maps the shared memory named by argv[1], exports it over backend argv[2], and obeys
// lines on stdin: "grant <offset> <bytes> <reads> <writes> <lasts_ns>" (answer "<id> <descriptor>"), "revoke <id>",
// "unregister" (answer: the error code), "refused" (answer: the number of refused accesses) and "quit" (answer "bye").
// First prints "ready <address> <region>", and for each notification "note <from> <body>". All bytes are in hex.
#include <poll.h>
#include <unistd.h>

#include <iostream>
#include <sstream>
#include <string>

#include "tests/transport/backends.h"
#include "tests/transport/hex.h"
#include "transport/shared_memory.h"

namespace kvferry {
namespace {

std::string code_of(const Result<void>& result) {
  return std::to_string(static_cast<int>(result ? ErrorCode::kOk : result.error().code));
}

std::string answer(Transport& transport, RegionId region, const std::string& line) {
  std::istringstream words(line);
  std::string verb;
  words >> verb;
  if (verb == "unregister") return code_of(transport.unregister_region(region));
  if (verb == "refused") return std::to_string(transport.num_refused());
  if (verb == "revoke") {
    GrantId grant;
    words >> grant.value;
    return code_of(transport.revoke(grant));
  }
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  GrantTerms terms;
  words >> offset >> bytes >> terms.reads >> terms.writes >> terms.lasts_ns;
  const GrantId grant = transport.grant(region, offset, bytes, terms).value();
  return std::to_string(grant.value) + ' ' + to_hex(transport.export_grant(grant).value());
}

int serve(const std::string& segment, const std::string& backend) {
  Result<SharedMemory> memory = SharedMemory::open(segment);
  if (!memory) {
    std::cerr << memory.error().str() << std::endl;
    return 1;
  }
  const std::unique_ptr<Transport> made = make_backend(backend);
  Transport& transport = *made;
  const Result<RegionId> region = transport.register_region(memory->region());
  if (!region) return 1;
  const Result<std::string> exported = transport.export_region(*region);
  if (!exported) return 1;
  std::cout << "ready " << to_hex(transport.address()) << ' ' << to_hex(*exported) << std::endl;

  while (true) {
    pollfd fds[] = {{STDIN_FILENO, POLLIN, 0}, {transport.event_fd(), POLLIN, 0}};
    ::poll(fds, 2, -1);
    for (const Notification& note : transport.poll_notifications())
      std::cout << "note " << to_hex(note.from) << ' ' << to_hex(note.body) << std::endl;
    if (fds[0].revents == 0) continue;
    std::string line;
    if (!std::getline(std::cin, line) || line == "quit") break;
    std::cout << answer(transport, *region, line) << std::endl;
  }
  transport.shutdown();
  std::cout << "bye" << std::endl;
  return 0;
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) { return argc == 3 ? kvferry::serve(argv[1], argv[2]) : 2; }
