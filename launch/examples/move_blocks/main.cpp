// Two processes have a cache of 64 blocks each. The parent pulls four of the child's blocks and pushes two of its own.
// The program prints what was moved, and exits with 1 if a byte is wrong.
#include <kvferry/transport/make_transport.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

using namespace kvferry;
constexpr std::uint64_t kBytes = 16 << 10;  // size of a block

CopyRange block(std::uint64_t mine, std::uint64_t its) { return {mine * kBytes, its * kBytes, kBytes}; }

template <class T>
T need(Result<T> result) {
  if (result) return std::move(result).value();
  std::fprintf(stderr, "%s\n", result.error().what.c_str());
  std::exit(1);
}

int main() {
  int channel[2];  // connects the two processes; any other channel works too
  if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, channel) != 0) return 1;
  const pid_t child = fork();
  std::string cache;
  for (int index = 0; index < 64; ++index) cache.append(kBytes, static_cast<char>(child == 0 ? index : 'A' + index));
  const auto holds = [&](std::size_t index, int byte) {
    return cache.compare(index * kBytes, kBytes, std::string(kBytes, static_cast<char>(byte))) == 0;
  };
  const std::unique_ptr<Transport> transport = need(make_transport({}));
  const RegionId region = need(transport->register_region(cache.data(), cache.size()));
  if (child == 0) {
    for (const std::string& text : {transport->address(), need(transport->export_region(region))})
      send(channel[1], text.data(), text.size(), 0);
    for (int num_notes = 0; num_notes < 2 && transport->wait(10 * kSecond);)
      for (const Notification& note : transport->poll_notifications())
        ++num_notes, std::printf("the parent says: %s\n", note.body.c_str());
    recv(channel[1], channel, 1, 0);  // waits until the parent is done
    return holds(5, 'A' + 40) && holds(33, 'A' + 41) && holds(6, 6) ? 0 : 1;
  }
  std::string address(65536, '\0'), remote(65536, '\0');
  for (std::string* text : {&address, &remote}) text->resize(recv(channel[0], text->data(), text->size(), 0));
  const PeerId peer = need(transport->connect(address));
  const auto move = [&](Direction direction, std::vector<CopyRange> ranges, const char* note) {
    need(transport->submit({peer, direction, region, remote, ranges, note}));
    while (!transport->wait(kSecond)) continue;
    return transport->poll().at(0).code == ErrorCode::kOk;
  };
  bool is_right = move(Direction::kPull, {block(7, 1), block(3, 60), block(9, 20), block(0, 2)}, "4 blocks pulled") &&
                  holds(7, 1) && holds(3, 60) && holds(9, 20) && holds(0, 2) && holds(1, 'A' + 1);
  is_right = move(Direction::kPush, {block(40, 5), block(41, 33)}, "2 blocks pushed") && is_right;
  int status = 1;
  if (send(channel[0], "", 1, 0) == 1) waitpid(child, &status, 0);
  std::puts(is_right && status == 0 ? "every byte is right" : "a byte is wrong");
  return is_right && status == 0 ? 0 : 1;
}
