// Functions that make a Transport between processes, and their options.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/clock.h"
#include "transport/base/net/cluster_key.h"
#include "transport/base/net/host_port.h"
#include "transport/base/net/tls.h"
#include "transport/base/result.h"
#include "transport/transport.h"

namespace kvferry {

/// Options of every backend. The defaults suit a worker node.
struct CommonOptions {
  std::uint32_t transfers_max = 1024;  // submit() returns kFull while this many transfers are pending or not polled
  TimeNs spin_ns = 20'000;             // a waiting thread polls this long before it sleeps
  TimeNs silence_ns = 2 * kSecond;     // a peer that owes an answer and is silent for this long is lost
  // This process's cluster key or member key. Over TCP, peers must have the same cluster key, or be members; without a
  // key, peers must have none. The other backends serve, if there is a list of members, only peers with an address from
  // address_for().
  std::optional<net::ClusterKey> key = {};
};

/// Options of the UCX backend. UCX's environment variables take precedence over `gpu_bus_id` and `nics`.
struct UcxOptions : CommonOptions {
  std::uint32_t operations_per_transfer_max = 32;  // limit of operations of one transfer posted to UCX at a time
  std::uint32_t operations_per_peer_max = 64;      // limit of operations of all transfers with one peer
  // Longer ranges are cut into operations of this size, which is small because a cancelled transfer ends only after its
  // posted operations.
  std::uint64_t operation_bytes_max = 1 << 20;
  // Where UCX emulates one-sided operations by messages (TCP), ranges of host memory with up to this many bytes on
  // average are packed into messages, which the receiver unpacks. Ranges in grants are always packed, because their
  // owner must be able to revoke the grants. 0: only ranges in grants are packed.
  std::uint64_t packed_bytes_max = 64 << 10;
  TimeNs stuck_ns = kSecond;  // a cancelled transfer without progress for this long ends its connection
  Device* device = nullptr;   // the GPU of the progress thread; must outlive the transport; nullptr: none
  // Number of the GPU on the PCI bus ("0000:1b:00.0"), near which network cards are chosen; empty: their distance does
  // not count.
  std::string gpu_bus_id;
  // Network cards to choose from: names of RDMA devices (with or without ":PORT") or of interfaces. Empty: all RDMA
  // devices; without `gpu_bus_id` UCX then chooses by itself.
  std::vector<std::string> nics;
};

/// Options of the shared memory backend, for transfers within one host: the submitting side copies, through a mapping
/// of the peer's shared memory or by CMA (process_vm_readv() and process_vm_writev()).
struct ShmOptions : CommonOptions {
  bool use_mappings = true;  // copies through a mapping if the peer registered its memory with a file descriptor
  bool use_cma = true;       // copies all other memory by CMA
  // A transfer of up to this many bytes is copied within submit() unless it has to wait, for example for the connection
  // or for another transfer with the peer.
  std::uint64_t inline_bytes = 65'536;
  // Number of threads that share large copies. 0: 4 if the process may use 16 CPUs or more, 2 for 2 to 15 CPUs, else 1.
  std::uint32_t copy_threads = 0;
};

/// Options of the TCP backend, which uses sockets between any two hosts.
struct TcpOptions : CommonOptions {
  std::string listen_host;  // host to listen on; empty: all interfaces
  net::PortRange listen_ports;
  std::uint32_t connections = 4;            // limit on connections to each peer on another host
  std::uint32_t local_connections = 1;      // limit on connections to each peer on this host
  std::uint64_t segment_bytes = 512 << 10;  // longer transfers are cut into segments of this size
  // Limit on the bytes that a connection has requested for pulls and not received. Below the limit, the connection
  // requests another segment of a pull; of an urgent pull, below twice the limit.
  std::uint64_t window_bytes = 16 << 20;
  net::Encrypt encrypt = net::Encrypt::kBetweenHosts;  // the connections to encrypt, if there is a key
};

/// Options of the NCCL backend, which uses NCCL's send and receive for memory of one GPU and for host memory, which is
/// pinned. The transfers that are submitted to one peer use two communicators, one for pulls and one for pushes; each
/// is made when it is first needed.
struct NcclOptions : CommonOptions {
  Device* device = nullptr;  // the GPU; must outlive the transport
  TcpOptions control;        // options of the TCP transport for control messages; their CommonOptions are ignored
  std::string library;       // path of libnccl.so.2; empty: $KVFERRY_NCCL_LIBRARY, or the loader's search
  std::uint64_t packed_bytes_max = 64 << 10;  // ranges of up to this many bytes are gathered and sent as one message
  // Size of a transfer's pieces, which is small because a cancelled transfer ends, and revoke() succeeds, only after
  // the pieces that have begun.
  std::uint64_t piece_bytes = 8 << 20;
  std::uint32_t pieces_per_peer_max = 8;  // limit of one peer's pieces that are requested or under way
  TimeNs stuck_ns = kSecond;              // a cancelled transfer without progress for this long ends the connection
  // A communicator without progress for this long ends the connection, even if the peer is alive.
  TimeNs hung_ns = 30 * kSecond;
};

/// Options of the backend that copies between the GPU memory of two processes of one host: the submitting process maps
/// the peer's memory, and its GPU copies. Both processes must use the same GPU, or GPUs that can access each other's
/// memory. `spin_ns` is not used: this backend has a polling time of its own (kDeviceSpinNs in gpu_ipc_backend.cpp).
struct GpuIpcOptions : CommonOptions {
  Device* device = nullptr;  // the GPU that copies; must outlive the transport
  // Maximum of bytes copied in one launch. The host takes as long to prepare a launch as the GPU to copy some 20 MiB.
  std::uint64_t piece_bytes = 64 << 20;
  // Limit of enqueued bytes. It is needed because a cancelled transfer ends, and an urgent one begins, only after the
  // copies that are enqueued already.
  std::uint64_t in_flight_bytes = 256 << 20;
};

/// Each of the functions below that make a transport starts the progress threads of its backends. kInvalidArgument: an
/// option is out of range, or a backend that needs a device has none. make_ucx_transport() returns kUnavailable if UCX
/// can't be loaded or finds no usable transport. It uses TCP only if the variable UCX_TLS is set and allows it.
Result<std::unique_ptr<Transport>> make_ucx_transport(const UcxOptions& options);
Result<std::unique_ptr<Transport>> make_shm_transport(const ShmOptions& options);
/// Makes a transport over TCP. kUnavailable: the address to listen on can't be bound. kInvalidArgument: an option is
/// out of range, or the host to listen on can't be resolved.
Result<std::unique_ptr<Transport>> make_tcp_transport(const TcpOptions& options);

/// Makes a transport over NCCL. kUnavailable: no CUDA in this build, NCCL can't be loaded (the message says what to
/// install), or the address can't be bound.
Result<std::unique_ptr<Transport>> make_nccl_transport(const NcclOptions& options);

/// Makes a transport for GPU memory on one host, over CUDA IPC. kUnavailable: the device can't create a stream, or the
/// shared memory transport that carries the control messages can't be made.
Result<std::unique_ptr<Transport>> make_gpu_ipc_transport(const GpuIpcOptions& options);

/// The way in which bytes are moved. kAuto: the fastest path, measured for each peer when it is connected.
enum class Path : std::uint8_t { kAuto, kShm, kCma, kUcx, kTcp, kNccl, kGpuIpc };
/// Returns the path with this name. kInvalidArgument: no path has this name; the message lists the allowed names.
Result<Path> parse_path(std::string_view name);
std::string_view name_of(Path path);
/// Returns the names that parse_path() accepts; with `has_gpu` also those of paths that need a GPU.
std::vector<std::string_view> path_names(bool has_gpu = true);

struct TransportOptions {
  Path path = Path::kAuto;
  CommonOptions common;
  ShmOptions shm;            // its CommonOptions are ignored; TransportOptions::path selects mappings and CMA
  TcpOptions tcp;            // options of the TCP backend; their CommonOptions are ignored
  UcxOptions ucx;            // options of the UCX backend; their CommonOptions are ignored
  Device* device = nullptr;  // GPU whose memory can be registered, must outlive the transport; nullptr: none
};

/// Makes a transport with all backends that `path` allows behind one address; for each transfer a planner chooses the
/// fastest one that reaches both ends.
Result<std::unique_ptr<Transport>> make_transport(const TransportOptions& options);
/// Returns the address of a transport of make_transport() for the process with this public CURVE key (in hexadecimal).
/// With it, that process reaches the transport as long as its key is accepted there, and no other process does. Needed
/// if there is a list of members. kInvalidArgument: the address is malformed.
Result<std::string> address_for(const std::string& address, std::string_view curve_key);

}  // namespace kvferry
