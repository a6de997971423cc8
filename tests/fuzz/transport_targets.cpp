// Fuzz targets for the addresses, region descriptors and messages of transports that kvferry itself parses.
#include "tests/fuzz/target.h"
#include "tests/transport/loopback/loopback_fabric.h"
#include "transport/nccl/messages.h"
#include "transport/planner/plan_address.h"
#include "transport/region_descriptor.h"
#include "transport/shm/messages.h"
#include "transport/tcp/messages.h"
#include "transport/transfer_table.h"
#include "transport/ucx/messages.h"
#include "transport/ucx/packed.h"

namespace kvferry::fuzz {
namespace {

template <class... Message>
void decode_all(std::string_view bytes) {
  const auto decode_one = [&]<class One>() {
    const Result<One> message = decode<One>(bytes, "message");
    if (!message) return;
    const std::string written = encode(*message);
    const Result<One> again = decode<One>(written, "message");
    KVFERRY_CHECK(again && encode(*again) == written, "a message is not read as it is written");
  };
  (decode_one.template operator()<Message>(), ...);
}

void run_transport_addresses(std::string_view bytes) {
  decode_all<tcp::Address, tcp::Hello, shm::Address, shm::RegionMemoryKey, ucx::Address, ucx::Hello, ucx::Welcome,
             nccl::Address, planner::Address, planner::RegionParts, RegionDescriptor>(bytes);
}

std::vector<std::string> transport_address_seeds() {
  const tcp::Endpoint endpoint{"10.0.0.1", 80};
  const std::string tcp = encode(tcp::Address{1, 2, "secret", {endpoint, endpoint}});
  const std::string region = encode(RegionDescriptor{1, 4096, 65536, encode(shm::RegionMemoryKey{}), 1, 2, false});
  return {tcp,
          region,
          encode(shm::Address{1, 2, 3, "name", "secret"}),
          encode(ucx::Address{3, 1, "worker", "secret"}),
          encode(nccl::Address{1, 2, {tcp, region}}),
          encode(planner::Address{2, {{"tcp", tcp}, {"shm", ""}}, {{1, {{"tcp", region}}}}}),
          encode(planner::RegionParts{0, {{"tcp", region}}})};
}

// ---- blocks packed into UCX messages: the blocks are read as UCX delivers them, then served ----

void run_ucx_blocks(std::string_view bytes) {
  static std::vector<std::byte> memory(4096);
  static const SteadyClock clock;
  TransferTable table(16, SecretNumbers("secret"), clock);
  const RegionId region = table.new_region_id();
  table.add_region(region, {.base = memory.data(), .bytes = memory.size()},
                   encode(RegionDescriptor{1, 0, memory.size(), "", 1, 0, false}));
  const GrantId grant = table.add_grant(region, 1024, 512, {}, "").value();
  Cutter cutter(bytes);
  while (!cutter.empty()) {
    const std::string_view packed = cutter.part();
    (void)ucx::read_packed<ucx::BlocksAnswer>(packed, "answer");
    (void)ucx::read_packed<ucx::NotificationMessage>(packed, "notification");
    const auto blocks = ucx::read_packed<ucx::BlocksMessage>(packed, "blocks");
    if (!blocks) continue;
    bool is_served = false;
    (void)ucx::serve(table, blocks->first, blocks->second, std::nullopt, is_served);
  }
  KVFERRY_CHECK(table.remove_grant(grant) && table.remove_region(region), "a peer's access never ended");
}

std::vector<std::string> ucx_block_seeds() {
  const auto packed = [](const ucx::BlocksMessage& message, std::string_view payload) {
    return as_part(ucx::begin_packed(message, payload.size()).append(payload));
  };
  return {packed({1, false, 1, 0, {0, 4, 4092, 4}, "from", "note", "secret"}, "12345678") +
              packed({2, true, 1, SecretNumbers("secret").draw(), {0, 512}, "", "", ""}, ""),
          as_part(ucx::begin_packed(ucx::BlocksAnswer{1, 0, ""}, 0)),
          as_part(ucx::begin_packed(ucx::NotificationMessage{"from", "body", "secret"}, 0))};
}

// ---- NCCL's control messages ----

void run_nccl_messages(std::string_view bytes) {
  const std::optional<nccl::Message> message = nccl::read_message(bytes);
  if (!message) return;
  decode_all<nccl::Hello, nccl::Open, nccl::Ask, nccl::Data, nccl::Answer, nccl::Notify, nccl::Bye>(message->body);
}

std::vector<std::string> nccl_message_seeds() {
  using namespace nccl;  // NOLINT(google-build-using-namespace)
  return {pack_message(1, Kind::kHello, encode(Hello{1, {"address", "region"}})),
          pack_message(1, Kind::kOpen, encode(Open{true, std::string(128, 'i')})),
          pack_message(1, Kind::kAsk, encode(Ask{1, 0, 1, 0, 65536, {0, 16, 32, 16}})),
          pack_message(1, Kind::kAnswer, encode(Answer{1, 0, "", {1, 2}})),
          pack_message(1, Kind::kNotify, encode(Notify{1, "from", "body"})),
          pack_message(1, Kind::kPing)};
}

// ---- a transfer to a peer that sent this address and this region descriptor ----

void run_remote_regions(std::string_view bytes) {
  static LoopbackFabric& fabric = *new LoopbackFabric;
  static std::vector<std::byte> here(4096), there(4096);
  const std::unique_ptr<Transport> ours = fabric.make_transport(), theirs = fabric.make_transport();
  const RegionId local = ours->register_region(here.data(), here.size()).value();
  const RegionId remote = theirs->register_region(there.data(), there.size()).value();
  std::string descriptor = theirs->export_region(remote).value();
  const auto peer = ours->connect(theirs->address()).value();
  Cutter cutter(bytes);
  while (!cutter.empty()) {
    const std::uint8_t how = cutter.byte();
    const std::uint64_t offset = cutter.byte(), remote_offset = cutter.byte(), length = cutter.byte();
    // The descriptor is either the fuzzer's own, or the right one with some bytes changed.
    if (how % 2 == 0) {
      descriptor = cutter.part();
    } else if (!descriptor.empty()) {
      for (const char change : cutter.part())
        descriptor[static_cast<unsigned char>(change) % descriptor.size()] ^= static_cast<char>(1 << (change & 7));
    }
    PagedTransfer transfer{peer,
                           how % 4 < 2 ? Direction::kPull : Direction::kPush,
                           local,
                           descriptor,
                           {{offset << (how & 63), remote_offset << (how >> 2), length << (how & 31)}},
                           {}};
    (void)ours->submit(std::move(transfer));
    (void)ours->poll();
  }
  ours->shutdown();
  theirs->shutdown();
}

std::vector<std::string> remote_region_seeds() {
  return {std::string("\1\0\0\10\0\0\2\0\0\10\0\0", 12), std::string("\0\0\0\10", 4) + as_part("descriptor")};
}

}  // namespace

const std::vector<Target> kTransportTargets = {
    {"transport_addresses", run_transport_addresses, transport_address_seeds},
    {"ucx_blocks", run_ucx_blocks, ucx_block_seeds},
    {"nccl_messages", run_nccl_messages, nccl_message_seeds},
    {"remote_regions", run_remote_regions, remote_region_seeds}};

}  // namespace kvferry::fuzz
