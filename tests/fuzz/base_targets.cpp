// Fuzz targets for texts and files from users, and for the shapes that nodes report.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "connector/runtime/config.h"
#include "connector/runtime/links/node_wire.h"
#include "controller/api/endpoint.h"
#include "controller/scale/url.h"
#include "launch/cli/controller_settings.h"
#include "tests/fuzz/target.h"
#include "transport/base/net/cluster_key.h"
#include "transport/base/net/host_port.h"
#include "transport/base/owned_fd.h"

namespace kvferry::fuzz {
namespace {

// ---- addresses ----

void run_addresses(std::string_view bytes) {
  using namespace controller;  // NOLINT(google-build-using-namespace)
  const std::string text(bytes);
  if (const auto address = net::parse_host_port(text)) {
    const auto again = net::parse_host_port(net::to_text(*address));
    KVFERRY_CHECK(again && *again == *address, "'{}' is not read as it is written", text);
  }
  (void)net::parse_host_port(text, 80);
  (void)net::address_of_endpoint(text);
  for (const EndpointUse use : {EndpointUse::kBind, EndpointUse::kBindStream, EndpointUse::kConnect}) {
    if (!check_endpoint(text, use)) continue;
    if (is_stream(text)) (void)stream_address(text);
    (void)is_beyond_loopback(text);
    (void)check_without_key(text);
    (void)check_for_cluster_key(text);
  }
  (void)split_endpoints(text);
  (void)scale::parse_etcd_url(text);
  (void)scale::parse_redis_url(text);
}

std::vector<std::string> address_seeds() {
  return {"127.0.0.1:80",
          "[::1]:65535",
          "host",
          "tcp://*:14600",
          "tcp://[fe80::1%eth0]:1",
          "ipc:///run/kvferry",
          "unix:///run/kvferry.sock",
          "stream://10.0.0.7:0",
          "tcp://a:1,tcp://b:2,unix:///c",
          "http://user:password@etcd:2379,other:2379/prefix",
          "redis://user:password@host:6379/3?stream=name&bytes=1000"};
}

// ---- settings: the first byte of the input chooses the program ----

/// A file in memory with these bytes. It has a path.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes) : fd_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    ::fchmod(fd_.get(), 0600);
    KVFERRY_CHECK(::write(fd_.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()), "memfd");
  }
  std::string path() const { return fmt::format("/proc/self/fd/{}", fd_.get()); }

 private:
  OwnedFd fd_;
};

void run_settings(std::string_view bytes) {
  const GetEnv no_env = [](const char*) { return nullptr; };
  Cutter cutter(bytes);
  const std::uint8_t kind = cutter.byte();
  const std::string_view text = cutter.rest();
  if (kind % 3 == 0) {
    const MemoryFile file(text);
    (void)load_config(fmt::format("{{\"config\": \"{}\"}}", file.path()), no_env);
  } else if (kind % 3 == 1) {
    const MemoryFile file(text);
    (void)read_settings(cli::controller_settings(), {file.path(), no_env, {}});
  } else {
    (void)load_config(std::string(text), no_env);
  }
}

std::vector<std::string> settings_seeds() {
  const std::string connector = "controller: tcp://10.0.0.1:14600\npool_bytes: 4GiB\npath: tcp\nlands_in_gpu: true\n";
  const std::string with_anchor = "a: &a [1, 2]\nchunk_tokens: *a\n";
  return {std::string(1, '\0') + connector, std::string(1, '\0') + with_anchor,
          "\1bind: tcp://127.0.0.1:0\nhttp: none\ninsecure: yes\n",
          "\2{\"chunk_tokens\": 256, \"pool_bytes\": \"1GiB\", \"save_decode_cache\": false}"};
}

// ---- keys ----

void run_cluster_key(std::string_view bytes) {
  const MemoryFile file(bytes);
  const auto key = net::read_cluster_key(file.path());
  const bool fits = bytes.size() >= net::ClusterKey::kBytesMin && bytes.size() <= net::ClusterKey::kBytesMax;
  const bool is_list = bytes.starts_with("kvferry cluster keys 1\n"), is_member = net::is_member_key(bytes);
  KVFERRY_CHECK(is_list || is_member || static_cast<bool>(key) == fits, "a key of {} bytes", bytes.size());
  if (const auto own = net::parse_member_key(bytes); own && is_member)
    KVFERRY_CHECK(net::parse_member_key(net::format_member_key(*own)).value() == *own, "the member's key is not kept");
  if (const auto members = net::parse_members(bytes))
    KVFERRY_CHECK(net::parse_members(net::format_members(*members)).value() == *members, "the members are not kept");
  if (!key) return;
  for (const net::ClusterKey& shared : (*key)->accepted_by_nodes()) (void)shared.derived("x");
  if (is_member) return;
  (void)(*key)->derived(bytes.substr(0, 8));
  std::vector<std::string> keys = net::parse_cluster_keys(bytes).value();
  KVFERRY_CHECK(net::parse_cluster_keys(net::format_cluster_keys(keys)).value() == keys, "the list is not kept");
}

std::vector<std::string> cluster_key_seeds() {
  const net::MemberKey worker{{"p-0", net::Role::kWorker}, {}, net::shared_with(net::Role::kWorker, {"k", "x"})};
  const net::MemberKey reader{{"r", net::Role::kReader}, {}, net::shared_with(net::Role::kReader, {"k"})};
  return {std::string(31, 'k'),
          std::string(32, 'k'),
          net::format_cluster_keys({std::string(32, 'k'), std::string(33, 'x')}),
          net::format_member_key(worker),
          net::format_member_key(reader),
          net::format_members({net::public_of(worker), net::public_of(reader)})};
}

// ---- the layouts of two nodes ----

struct Shapes {
  std::vector<Shard> readers, holders;
  KVFERRY_FIELDS(readers, holders);
};

void run_shard_map(std::string_view bytes) {
  const Result<Shapes> shapes = decode<Shapes>(bytes, "shapes");
  if (!shapes) return;
  const Result<ShardMap> map = map_shards(shapes->readers, shapes->holders);
  if (!map) return;
  KVFERRY_CHECK(map->size() == shapes->readers.size(), "a reader without a map");
  for (std::size_t reader = 0; reader < map->size(); ++reader) {
    std::uint64_t next = 0;
    for (const ShardRun& run : (*map)[reader]) {
      KVFERRY_CHECK(run.target == next && run.cells > 0 && run.holder < shapes->holders.size(), "a gap");
      const std::uint64_t there = shapes->holders[run.holder].num_cells();
      KVFERRY_CHECK(run.cells <= there && run.source <= there - run.cells, "a run outside of the holder's chunk");
      next += run.cells;
    }
    KVFERRY_CHECK(next == shapes->readers[reader].num_cells(), "a chunk that is not filled");
  }
}

std::vector<std::string> shard_map_seeds() {
  return {encode(Shapes{{{0, 2, 0, 2}, {0, 2, 2, 2}}, {{0, 2, 0, 4}}}),
          encode(Shapes{{{0, 4, 0, 4}}, {{0, 2, 0, 4}, {2, 2, 0, 2}, {2, 2, 2, 2}}})};
}

struct PartedShapes {
  std::vector<ShardParts> readers, holders;
  KVFERRY_FIELDS(readers, holders);
};

void run_shard_parts(std::string_view bytes) {
  const Result<PartedShapes> shapes = decode<PartedShapes>(bytes, "shapes");
  if (!shapes) return;
  const Result<ShardMap> map = map_parts(shapes->readers, shapes->holders);
  if (!map) return;
  KVFERRY_CHECK(map->size() == shapes->readers.size(), "a reader without a map");
  for (std::size_t reader = 0; reader < map->size(); ++reader) {
    std::uint64_t end = 0, read = 0, wanted = 0;
    for (const ShardRun& run : (*map)[reader]) {
      KVFERRY_CHECK(run.target >= end && run.cells > 0 && run.holder < shapes->holders.size(), "runs out of order");
      const std::uint64_t there = shapes->holders[run.holder].num_bytes();
      KVFERRY_CHECK(run.cells <= there && run.source <= there - run.cells, "a run outside of the holder's chunk");
      end = run.target + run.cells;
      read += run.cells;
    }
    const ShardParts& rank = shapes->readers[reader];
    for (const std::uint32_t kind : rank.kinds)
      for (const LayerPart& part : rank.parts[kind]) wanted += part.whole == 0 ? 0 : part.bytes;
    KVFERRY_CHECK(read == wanted && end <= rank.num_bytes(), "a chunk that is not filled");
  }
}

std::vector<std::string> shard_parts_seeds() {
  const auto rank = [](std::uint64_t tp_rank, std::uint64_t tp_size) {
    const std::uint64_t divided = 48 / tp_size;
    return ShardParts{0,
                      {0, 1},
                      {{{128, tp_rank * 128 / tp_size, 128 / tp_size}},
                       {{48, tp_rank * divided, divided}, {8, 0, 8}, {0, 0, 128 / tp_size - divided - 8}}}};
  };
  return {encode(PartedShapes{{rank(0, 1)}, {rank(0, 2), rank(1, 2)}}),
          encode(PartedShapes{{rank(0, 2), rank(1, 2)}, {rank(0, 1)}})};
}

}  // namespace

const std::vector<Target> kBaseTargets = {{"addresses", run_addresses, address_seeds},
                                          {"settings", run_settings, settings_seeds},
                                          {"cluster_key", run_cluster_key, cluster_key_seeds},
                                          {"shard_map", run_shard_map, shard_map_seeds},
                                          {"shard_parts", run_shard_parts, shard_parts_seeds}};

}  // namespace kvferry::fuzz
