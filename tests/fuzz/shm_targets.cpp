// Fuzz targets for packets with descriptors over Unix sockets, in both directions, and for pages that another process
// changes while they are read.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "tests/fuzz/target.h"
#include "transport/make_transport.h"
#include "transport/shm/shared_page.h"
#include "transport/shm/shm_link.h"
#include "transport/shm/unix_socket.h"

namespace kvferry::fuzz {

using namespace shm;  // NOLINT(google-build-using-namespace)

namespace {

/// Returns a descriptor that a peer may send. `which` chooses among valid and invalid descriptors.
int some_fd(std::uint8_t which) {
  static const SharedMapping ring = SharedMapping::create("ring", NoteRing::kPageBytes).value();
  static const SharedMapping control = [] {
    SharedMapping pages = SharedMapping::create("control", ControlPage::kPageBytes).value();
    ControlPage(SharedMapping::map(OwnedFd(::dup(pages.fd())), 0, ControlPage::kPageBytes).value())
        .open(0, ControlPage::pass(1));
    return pages;
  }();
  static const SharedMapping region = SharedMapping::create("region", 8192).value();
  static const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  static const int unsealed = ::memfd_create("unsealed", MFD_CLOEXEC);
  const int fds[] = {ring.fd(), control.fd(), region.fd(), null, unsealed};
  return fds[which % std::size(fds)];
}

/// Sends the next packet of an input: its type, a byte that chooses the descriptors, and its body.
void send_next(int socket, Cutter& cutter) {
  const auto type = static_cast<Type>(cutter.byte());
  const std::uint8_t which = cutter.byte();
  const std::vector<int> all = {some_fd(which & 7), some_fd((which >> 3) & 7), some_fd(2)};
  (void)send_packet(socket, type, cutter.part(), std::span(all).first(which >> 6));
}

std::string packet(Type type, std::string_view body, char fds = 0) {
  return std::string{static_cast<char>(type), fds} + as_part(body);
}
constexpr char kOneRegion = 0x40 | 2, kRingAndControl = static_cast<char>(0x80 | 1 << 3);

// ---- a transport whose peer sends these packets, after a valid hello or, if the first byte is odd, at once ----

void run_shm_requests(std::string_view bytes) {
  static Transport& transport = *make_shm_transport({}).value().release();
  static const Address address = decode<Address>(transport.address(), "address").value();
  static std::vector<std::byte> memory(4096);
  static const RegionId region = transport.register_region(memory.data(), memory.size()).value();
  (void)region;
  const OwnedFd socket = connect_to(address.socket_name).value();
  Cutter cutter(bytes);
  if (cutter.byte() % 2 == 0)
    send_message(socket.get(), Type::kHello, Hello{kProtocolVersion, address.incarnation, address.secret, "from"});
  while (!cutter.empty()) send_next(socket.get(), cutter);
  ::shutdown(socket.get(), SHUT_WR);
  pollfd item{socket.get(), POLLIN, 0};
  while (::poll(&item, 1, 10'000) == 1 && !receive_packet(socket.get()).is_closed) {
  }
  KVFERRY_CHECK((item.revents & (POLLIN | POLLHUP)) != 0, "the transport does not close a connection that has ended");
  (void)transport.poll_notifications();
}

std::vector<std::string> shm_request_seeds() {
  const std::string requests = packet(Type::kMapRequest, encode(MapRequest{1})) + packet(Type::kPing, "") +
                               packet(Type::kWake, "", kOneRegion) + packet(Type::kMapRequest, "");
  return {'\0' + requests, '\1' + packet(Type::kHello, encode(Hello{1, 2, "secret", "from"})) + requests};
}

// ---- a link whose target sends these packets ----

void run_shm_answers(std::string_view bytes) {
  static const std::string name = fmt::format("kvferry-fuzz-{}", ::getpid());
  static const int listener = listen_on(name).value().release();
  ShmOptions options;
  options.use_cma = false;  // the "peer" is this process itself
  options.copy_threads = 1;
  static CopyThreadPool& threads = *new CopyThreadPool(1);
  static const SteadyClock clock;
  TransferTable table(16, SecretNumbers("secret"), clock);
  std::vector<std::byte> memory(4096);
  const RegionId local = table.new_region_id();
  table.add_region(local, {.base = memory.data(), .bytes = memory.size()}, "");
  const PeerId peer = table.connect("peer", 1).peer;
  {
    ShmLink link(peer, {kProtocolVersion, 1, host_identity(), name, "secret"}, options, table, threads, clock);
    (void)link.connect("from", kSecond);
    const OwnedFd socket = accept_from(listener);
    const std::string remote =
        encode(RegionDescriptor{1, 4096, 8192, encode(RegionMemoryKey{true, 4096, 0}), 1, 0, false});
    for (const Direction direction : {Direction::kPull, Direction::kPush}) {
      PagedTransfer transfer{peer, direction, local, remote, {{0, 0, 1024}, {2048, 8000, 192}}, "note"};
      if (auto accepted = table.accept(std::move(transfer))) link.submit(std::move(*accepted));
    }
    Cutter cutter(bytes);
    for (TimeNs now = kSecond; !cutter.empty() && !link.is_failed(); now += kMillisecond) {
      send_next(socket.get(), cutter);
      link.on_readable(now);
      for (int i = 0; i < 10 && link.advance(now); ++i) {
      }
    }
  }
  KVFERRY_CHECK(table.num_open() == 0, "a transfer without an end");
}

std::vector<std::string> shm_answer_seeds() {
  const std::string welcome = packet(Type::kWelcome, encode(Welcome{"", 0}), kRingAndControl);
  return {welcome + packet(Type::kMapReply, encode(MapReply{1, "", 0, 8192}), kOneRegion) + packet(Type::kPong, "") +
              packet(Type::kUnmap, encode(MapRequest{1})),
          welcome + packet(Type::kMapReply, encode(MapReply{1, "", 4096, 4096}), kOneRegion),
          welcome + packet(Type::kMapReply, encode(MapReply{1, "no", 0, 0})),
          packet(Type::kWelcome, encode(Welcome{"no", 0}))};
}

// ---- the ring of notifications, which its producer overwrites while it is read ----

/// A thread that repeatedly writes numbers of the input into the ring's header.
class Mutator {
 public:
  explicit Mutator(const SharedMapping& pages)
      : words_(reinterpret_cast<std::atomic<std::uint64_t>*>(pages.span().data())) {
    std::thread([this] {
      for (std::size_t i = 0;; ++i) {
        const std::uint64_t value = value_.load(std::memory_order_relaxed);
        if (value == 0) continue;
        words_[i % kHeaderWords].store(value + i % 16, std::memory_order_relaxed);
        words_[kDataWord + i % 64].store(value ^ i, std::memory_order_relaxed);
      }
    }).detach();
  }
  void set(std::uint64_t value) { value_ = value; }

 private:
  static constexpr std::size_t kHeaderWords = 32, kDataWord = 4096 / 8;
  std::atomic<std::uint64_t>* words_;
  std::atomic<std::uint64_t> value_{0};
};

void run_note_ring(std::string_view bytes) {
  static const SharedMapping& pages = *new SharedMapping(SharedMapping::create("ring", NoteRing::kPageBytes).value());
  static Mutator& mutator = *new Mutator(pages);
  Cutter cutter(bytes);
  const std::size_t where = cutter.byte();
  std::uint64_t value = 0;
  for (int i = 0; i < 8; ++i) value = value << 8 | cutter.byte();
  mutator.set(0);
  const std::string_view rest = cutter.rest();
  std::memcpy(pages.span().data() + (where % 2 == 0 ? 0 : 4096), rest.data(), std::min<std::size_t>(rest.size(), 4096));
  mutator.set(where % 4 < 2 ? 0 : value);
  NoteRing ring(SharedMapping::map(OwnedFd(::dup(pages.fd())), 0, NoteRing::kPageBytes).value());
  for (int i = 0; i < 64; ++i) {
    const auto note = ring.pop();
    KVFERRY_CHECK(!note || note->size() <= NoteRing::kCapacity, "a note of {} bytes", note->size());
    if (!note && ring.is_broken()) break;
    bool must_wake = false;
    if (i % 16 == 3) (void)ring.push("note", must_wake);
  }
  mutator.set(0);
}

std::vector<std::string> note_ring_seeds() {
  std::string quiet(1 + 8 + 80, '\0');
  quiet[9 + 64] = 12;  // this byte is the ring's tail
  std::string busy = quiet;
  busy[0] = 2;
  busy[8] = 40;
  return {quiet, busy, std::string("\3\0\0\0\0\0\4\0\0\10\0\0\0note", 17)};
}

}  // namespace

const std::vector<Target> kShmTargets = {{"shm_requests", run_shm_requests, shm_request_seeds},
                                         {"shm_answers", run_shm_answers, shm_answer_seeds},
                                         {"note_ring", run_note_ring, note_ring_seeds}};

}  // namespace kvferry::fuzz
