// One of the two hosts of two_hosts_test.py. Moves bytes between its own memory and the memory of a remote_process.
// The remote_process maps memory that this program has made, so that this program can compare every byte.
// host_driver BACKEND BYTES prints "memory <name>" (for remote_process), then reads lines from stdin and answers each:
//   peer <address> <region>               (hex) connects; "peer <id>"
//   move pull|push <ranges> <bytes> <note>  paints both memories, submits that many ranges of up to so many bytes each,
//                                         with that notification unless it is "-"; "moving <id>"
//   await                                 the next completion: "done <id> <code> <ms since move> equal|differs|unknown"
//   cancel <id>                           "cancelling"
//   leave                                 disconnects; "left"
//   paint                                 "painted"; look: "quiet" as long as the own memory holds what was painted
//   quit
#include <iostream>
#include <sstream>
#include <string>

#include "tests/transport/backends.h"
#include "tests/transport/hex.h"
#include "tests/transport/transport_fixture.h"
#include "transport/shared_memory.h"

namespace kvferry {
namespace {

std::vector<std::byte> copy_of(std::span<const std::byte> memory) { return {memory.begin(), memory.end()}; }

class Driver {
 public:
  Driver(const std::string& backend, std::uint64_t bytes)
      : theirs_(SharedMemory::create("host", bytes).value()),
        mine_(bytes),
        transport_(make_backend(backend)),
        local_(transport_->register_region(mine_.data(), mine_.size()).value()) {}

  std::string memory_name() const { return theirs_.name(); }

  std::string answer(const std::string& line) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    if (verb == "peer") return connect(words);
    if (verb == "move") return move(words);
    if (verb == "await") return await();
    if (verb == "cancel") return cancel(words);
    if (verb == "leave") return transport_->disconnect(peer_), "left";
    if (verb == "paint") return fill(mine_, ++seed_), painted_ = mine_, "painted";
    if (verb == "look") return mine_ == painted_ ? "quiet" : "written";
    return "error unknown line " + line;
  }

 private:
  std::string connect(std::istringstream& words) {
    std::string address;
    std::string region;
    words >> address >> region;
    const Result<PeerId> peer = transport_->connect(from_hex(address));
    if (!peer) return "error " + peer.error().what;
    peer_ = *peer;
    region_ = from_hex(region);
    return fmt::format("peer {}", peer_);
  }

  std::string move(std::istringstream& words) {
    std::string direction;
    std::size_t num_ranges = 0;
    std::uint64_t bytes_max = 0;
    std::string note;
    words >> direction >> num_ranges >> bytes_max >> note;
    const bool is_pull = direction == "pull";
    const std::vector<CopyRange> ranges = random_ranges(++seed_, num_ranges, bytes_max);
    fill(mine_, seed_);
    fill(theirs_.span(), ~seed_);
    is_pull_ = is_pull;
    expected_ = is_pull ? mine_ : copy_of(theirs_.span());
    for (const CopyRange& range : ranges) {
      const std::byte* from = is_pull ? theirs_.data() + range.remote_offset : mine_.data() + range.local_offset;
      std::copy_n(from, range.bytes, expected_.data() + (is_pull ? range.local_offset : range.remote_offset));
    }
    submitted_at_ = clock_.now();
    const Result<TransferId> id = transport_->submit({.peer = peer_,
                                                      .direction = is_pull ? Direction::kPull : Direction::kPush,
                                                      .local = local_,
                                                      .remote_region = region_,
                                                      .ranges = ranges,
                                                      .notification = note == "-" ? "" : note});
    return id ? fmt::format("moving {}", *id) : "error " + id.error().what;
  }

  std::string await() {
    std::vector<Completion> completions = transport_->poll();
    const TimeNs deadline = clock_.now() + 60 * kSecond;
    while (completions.empty() && clock_.now() < deadline) {
      transport_->wait(kSecond);
      completions = transport_->poll();
    }
    if (completions.size() != 1) return fmt::format("error {} completions", completions.size());
    const TimeNs ms = (clock_.now() - submitted_at_) / kMillisecond;
    const std::span<const std::byte> got = is_pull_ ? std::span<const std::byte>(mine_) : theirs_.span();
    const bool is_equal = std::equal(got.begin(), got.end(), expected_.begin());
    const bool is_ok = completions[0].code == ErrorCode::kOk;
    return fmt::format("done {} {} {} {}", completions[0].id, static_cast<int>(completions[0].code), ms,
                       !is_ok     ? "unknown"
                       : is_equal ? "equal"
                                  : "differs");
  }

  std::string cancel(std::istringstream& words) {
    TransferId id;
    words >> id.value;
    transport_->cancel(id);
    return "cancelling";
  }

  const SteadyClock clock_;
  SharedMemory theirs_;
  std::vector<std::byte> mine_;
  std::vector<std::byte> painted_;
  std::vector<std::byte> expected_;
  bool is_pull_ = true;
  TimeNs submitted_at_ = 0;
  std::uint64_t seed_ = 0;
  std::unique_ptr<Transport> transport_;
  RegionId local_;
  PeerId peer_;
  std::string region_;
};

int drive(const std::string& backend, std::uint64_t bytes) {
  Driver driver(backend, bytes);
  std::cout << "memory " << driver.memory_name() << std::endl;
  for (std::string line; std::getline(std::cin, line) && line != "quit";) std::cout << driver.answer(line) << std::endl;
  return 0;
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) { return argc == 3 ? kvferry::drive(argv[1], std::stoull(argv[2])) : 2; }
