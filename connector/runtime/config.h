// The connector's settings. A new setting needs a field of ConnectorConfig and a row in make_connector_settings().
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "controller/api/endpoint.h"
#include "transport/base/net/host_port.h"
#include "transport/base/net/tls.h"
#include "transport/base/result.h"
#include "transport/base/settings.h"
#include "transport/make_transport.h"

namespace kvferry {

inline constexpr std::array<std::string_view, 3> kChunkDtypes = {"float32", "bfloat16", "float16"};

struct ConnectorConfig {
  std::string controller = "tcp://127.0.0.1:14600";
  std::uint32_t chunk_tokens = 256;
  static constexpr std::uint64_t kShareOfGpu = UINT64_MAX;  // stands for default_gpu_pool_bytes()
  std::uint64_t pool_bytes = 0;                             // size of the pool; 0 stands for default_pool_bytes()
  std::uint64_t gpu_pool_bytes = kShareOfGpu;
  bool lands_in_gpu = true;
  std::uint32_t push_layers = 0;
  bool save_decode_cache = true;
  bool save_partial_chunks = true;
  bool save_draft_kv = true;
  bool whole_blocks = false;
  bool require_cache_salt = false;
  std::string chunk_dtype;    // one of kChunkDtypes; empty: this server's own
  std::string path = "auto";  // one of the names that parse_path() accepts
  std::string nics = "auto";  // "auto", "all" or names with commas between
  std::int64_t load_timeout_ms = 5000;
  std::int64_t silence_ms = 2000;
  // Address that peers connect to; empty: this host's address on the route to the controller.
  std::string advertise_host;
  std::string ports;  // a range that net::parse_port_range() accepts; empty: any port
  std::string name_space = "default";
  std::string update_group;                   // see connector_settings(); empty: the group of nodes that name no group
  std::string serves;                         // URL under which routers reach this vLLM server; empty: none
  std::string cluster_key_file;               // path of the key file; empty: there is no key
  std::string encrypt_tcp = "between_hosts";  // one of the names in net::kEncryptNames
  bool insecure = false;
  std::string config;  // path of the YAML file; empty: none
};

/// Returns true if `url` is empty, or has the form of a server's URL: http:// or https://, a host and perhaps more, up
/// to 512 characters. Checks only the form, and does not connect.
bool is_server_url(const std::string& url);

/// Returns true if `name` has at most 64 characters, each a letter, a digit, '.', '-' or '_'.
bool is_group_name(const std::string& name);

/// Splits a list of names at its commas. Returns no names if one of them is empty.
std::vector<std::string> split_nics(const std::string& names);

/// Makes the table for connector_settings(), in the order in which the documentation lists the settings.
inline std::vector<Setting<ConnectorConfig>> make_connector_settings() {
  using C = ConnectorConfig;
  const std::string boolean = "true or false", bytes = "a number of bytes, or a string like \"512MiB\" or \"4GiB\"";
  const auto is_given = [](const std::string& text) { return !text.empty(); };
  return {
      setting<C, std::string>(
          "controller", &C::controller,
          "tcp://HOST:PORT, ipc://PATH, unix:///ABSOLUTE/PATH or stream://HOST:PORT; several replicas with commas "
          "between",
          "The controller, or its replicas; it must be reachable at start, and may stop and restart later",
          [](const std::string& endpoints) { return static_cast<bool>(controller::split_endpoints(endpoints)); }),
      setting<C, std::uint32_t>(
          "chunk_tokens", &C::chunk_tokens, "an integer from 1 to 65536, a multiple of the block size",
          "Tokens in a chunk; the same on all nodes", [](std::uint32_t n) { return n >= 1 && n <= 65536; }),
      setting("pool_bytes", &C::pool_bytes, bytes + "; 0: the default",
              "Shared memory for chunks, for each rank; reserved at start")
          .with_shown_default("a sixteenth of the free memory, 1GiB to 16GiB"),
      setting("gpu_pool_bytes", &C::gpu_pool_bytes, bytes + "; 0: none",
              "GPU memory for chunks, for each rank, in addition to pool_bytes; used only if the model's KV cache is "
              "in GPU "
              "memory. If it is 0, chunks are packed straight into pinned host memory")
          .with_shown_default("half of the GPU memory that the engine leaves free, less 1GiB; at most pool_bytes"),
      setting("lands_in_gpu", &C::lands_in_gpu, boolean,
              "Whether chunks go from GPU pool to GPU pool where a path between the nodes reaches both; all others go "
              "through the pools of host memory"),
      setting<C, std::uint32_t>(
          "push_layers", &C::push_layers, "an integer from 0 to 64; 0: off",
          "Number of groups of layers in which a prefill server on GPUs hands over what it computes for a decode "
          "server "
          "(kvferry_push_to) that pulls from GPU pool to GPU pool: the groups move while the later layers are "
          "computed. "
          "With 0 all layers move when the step has ended. It costs full CUDA graphs: vLLM uses piecewise ones "
          "instead, "
          "which slows down decoding on this server; steps without hooks in each layer are handed over as with 0",
          [](std::uint32_t n) { return n <= 64; }),
      setting("save_decode_cache", &C::save_decode_cache, boolean,
              "Whether KV of decoded tokens is saved, for preempted requests and the next turn"),
      setting("save_partial_chunks", &C::save_partial_chunks, boolean,
              "Whether tails are saved: the last, shorter chunk of a request")
          .with_alias("save_unfull_chunk"),
      setting(
          "save_draft_kv", &C::save_draft_kv, boolean,
          "Whether chunks contain the KV of a draft model's layers (speculative decoding with MTP, EAGLE or a draft "
          "model). With false, this node shares chunks with nodes that have no draft model; after tokens whose KV "
          "was loaded fewer drafts are accepted, and the answers are the same"),
      setting("whole_blocks", &C::whole_blocks, boolean,
              "Whether chunks and tails end at the ends of blocks, and each block of the KV cache is copied as bytes, "
              "whatever order its elements have. It is so by itself for bfloat16 with AMX kernels, with context "
              "parallelism and for models with state. Nodes then share only if the order is the same on both "
              "(order in the fingerprint)"),
      setting("require_cache_salt", &C::require_cache_salt, boolean,
              "Whether only requests with a cache_salt share KV: others are neither saved nor looked up, here and in "
              "vLLM's own prefix cache. For routers that give each tenant a salt, as launch/proxy does"),
      setting<C, std::string>(
          "chunk_dtype", &C::chunk_dtype,
          fmt::format("one of {}; empty: this server's own", fmt::join(kChunkDtypes, ", ")),
          "The --dtype of the servers whose chunks this node reads, if its own KV is of another type: with bfloat16 a "
          "server with --kv-cache-dtype fp8 reads what servers with bfloat16 have computed. Such a node converts what "
          "it loads and saves nothing itself; the servers that it reads from need no setting",
          [](const std::string& name) { return name.empty() || std::ranges::count(kChunkDtypes, name) > 0; }),
      setting<C, std::string>("path", &C::path, fmt::format("one of {}", fmt::join(path_names(), ", ")),
                              "Backend that carries chunks; auto measures which one is fastest to each peer",
                              [](const std::string& name) { return static_cast<bool>(parse_path(name)); }),
      setting<C, std::string>("nics", &C::nics, "auto, all, or names of RDMA devices or interfaces with commas between",
                              "Network cards that UCX uses. With auto each rank uses the RDMA devices nearest to its "
                              "GPU, and ranks that are equally near to several devices share these out; with names, "
                              "ranks choose among the named cards in the same way. UCX_NET_DEVICES has priority",
                              [](const std::string& names) { return !split_nics(names).empty(); }),
      setting<C, std::int64_t>("load_timeout_ms", &C::load_timeout_ms, "an integer from 1 to 600000",
                               "Longest time that a request waits for other nodes before its tokens are computed here",
                               [](std::int64_t ms) { return ms >= 1 && ms <= 600'000; }),
      setting<C, std::int64_t>("silence_ms", &C::silence_ms, "an integer from 500 to 600000",
                               "A node or controller that owes an answer and is silent for this long is taken as lost",
                               [](std::int64_t ms) { return ms >= 500 && ms <= 600'000; }),
      setting<C, std::string>("advertise_host", &C::advertise_host,
                              "a host name or address at which other nodes reach this node",
                              "Where other nodes reach this node", is_given)
          .with_shown_default("this host's address on the route to the controller"),
      setting<C, std::string>(
          "ports", &C::ports, "FIRST-LAST or PORT, of 1 to 65535; empty: any free port",
          "TCP ports at which other nodes reach this node, for firewalls: a vLLM server needs one port; "
          "each of its ranks needs one port with path tcp or nccl, and two with path auto",
          [](const std::string& ports) { return static_cast<bool>(net::parse_port_range(ports)); }),
      setting<C, std::string>("namespace", &C::name_space, "a name that is not empty",
                              "Nodes of one namespace serve one model; a node with another model is refused at start",
                              is_given),
      setting<C, std::string>(
          "update_group", &C::update_group, "up to 64 letters, digits, dots, dashes and underscores; empty: none",
          "Servers that started together and get the same updates of weights; once its cache was reset, a node "
          "shares KV within its group only. A server that starts after others were updated needs a group of its own",
          is_group_name),
      setting<C, std::string>("serves", &C::serves, "http://HOST:PORT or https://HOST:PORT; empty: none",
                              "URL under which routers reach this vLLM server; the controller passes it on to routers",
                              is_server_url),
      setting(
          "cluster_key_file", &C::cluster_key_file,
          "the path of a file of 32 to 65536 bytes with mode 0600 or 0400; empty: none",
          "Key of the deployment, the same on all controllers, nodes and proxies: it encrypts and authenticates what "
          "they send each other over tcp://, and signs the addresses in kv_transfer_params; without a key every HTTP "
          "client can name an address to which this node connects"),
      setting<C, std::string>("encrypt_tcp", &C::encrypt_tcp,
                              fmt::format("one of {}", fmt::join(net::kEncryptNames, ", ")),
                              "Which TCP connections between nodes encrypt chunks, if there is a cluster key; the "
                              "other connections are only "
                              "authenticated, so an attacker who can change packets on the way can change chunks",
                              [](const std::string& name) { return net::parse_encrypt(name).has_value(); }),
      setting(
          "insecure", &C::insecure, boolean,
          "Whether the node starts without a cluster key although other hosts can reach it: each of these hosts can "
          "then read and replace the node's chunks"),
      setting("config", &C::config, "the path of a file; empty: none", "A YAML file with the same keys"),
  };
}

std::span<const Setting<ConnectorConfig>> connector_settings();

/// Reads all settings. `extra_json` is a JSON object, as in kv_connector_extra_config. A value in `extra_json` has
/// priority over KVFERRY_<KEY> in the environment, and the environment over the YAML file that the key `config` names.
/// Errors: kInvalidArgument with one sentence that says what is wrong.
Result<ConnectorConfig> load_config(const std::string& extra_json, const GetEnv& get_env);

/// Returns the options of a worker's transport. Reads the key file. Errors: kInvalidArgument if the file can't be used,
/// or if the path or the ports are not valid.
/// `gpu_bus_id` is the number of the rank's GPU on the PCI bus, empty if the rank has no GPU.
Result<TransportOptions> transport_options(const ConnectorConfig& config, const std::string& gpu_bus_id = "");

}  // namespace kvferry
