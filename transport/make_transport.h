// How to get a Transport that crosses processes, without seeing what carries it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "transport/base/clock.h"
#include "transport/base/result.h"
#include "transport/transport.h"

namespace kvferry {

/// What every backend takes alike. The defaults suit a worker node.
struct CommonOptions {
  std::uint32_t transfers_max = 1024;  // accepted and not yet polled; more is kFull
  TimeNs spin_ns = 20'000;             // whoever waits looks this long for work before it sleeps
  TimeNs silence_ns = 2 * kSecond;     // a peer that owes an answer and says nothing for this long is dead
};

/// UCX itself is set by its own variables (UCX_TLS, UCX_NET_DEVICES).
struct UcxOptions : CommonOptions {
  std::uint32_t operations_per_transfer_max = 32;  // posted to UCX at a time
  std::uint32_t operations_per_peer_max = 64;      // the same, all transfers with one peer together
  std::uint64_t operation_bytes_max = 1 << 20;     // longer ranges are cut, so that cancel() need not wait for them
  // Where one-sided operations are emulated by messages anyway (TCP), ranges of up to this many bytes travel many in a
  // message that the other side unpacks; 0: never but by grants, whose owner must be able to take them back.
  std::uint64_t packed_bytes_max = 64 << 10;
  TimeNs stuck_ns = kSecond;  // a cancelled transfer without any progress for this long takes its connection down
};

/// Same host: one copy by the side that submits, through a mapping of the peer's shared memory or by CMA.
struct ShmOptions : CommonOptions {
  bool use_mappings = true;             // of memory that was registered with a descriptor
  bool use_cma = true;                  // for all other memory
  std::uint64_t inline_bytes = 65'536;  // up to this many are copied within submit()
  std::uint32_t copy_threads = 0;  // that share large copies, the submitter's included; 0: two, or four of 16 cores
};

/// Sockets between any two hosts.
struct TcpOptions : CommonOptions {
  std::string listen_host;  // also what peers are told; empty: every interface, and the addresses of all of them
  std::uint16_t listen_port = 0;
  std::uint32_t connections = 4;            // to a peer on another host, sharing its transfers
  std::uint32_t local_connections = 1;      // to one on this host: no delay to hide, and one stays in the cache
  std::uint64_t segment_bytes = 512 << 10;  // of one transfer on one connection at a time
  std::uint64_t window_bytes = 16 << 20;    // asked for and not yet here, one connection
};

/// NCCL's point-to-point: memory of one GPU, and host memory, which it pins. Two communicators for the transfers to a
/// peer, pulls and pushes, made when they are first wanted.
struct NcclOptions : CommonOptions {
  Device* device = nullptr;                   // whose memory it reaches; outlives the transport
  TcpOptions control;                         // the link for all but the bytes; its CommonOptions are not read
  std::string library;                        // libnccl.so.2; empty: KVFERRY_NCCL_LIBRARY, or where the loader finds it
  std::uint64_t packed_bytes_max = 64 << 10;  // ranges of up to this many bytes are gathered and travel as one
  std::uint64_t piece_bytes = 8 << 20;        // of one transfer at a time: cancel() and revoke() wait for no more
  std::uint32_t pieces_per_peer_max = 8;      // asked for or under way
  TimeNs stuck_ns = kSecond;      // a cancelled transfer without any progress for this long takes its session down
  TimeNs hung_ns = 30 * kSecond;  // so does a communicator without any, although its peer is alive
};

/// GPU memory of two processes of one host: the peer's is mapped and copied by this side's device. The two device
/// objects of a connection are of one kind, of the same GPU or of GPUs that reach each other.
struct GpuIpcOptions : CommonOptions {
  Device* device = nullptr;                  // whose memory is registered, and which copies; outlives the transport
  std::uint64_t piece_bytes = 16 << 20;      // of a transfer in one launch
  std::uint64_t in_flight_bytes = 64 << 20;  // given to the device: cancel() and urgent transfers wait for no more
};

/// Host memory over UCP. Starts the progress thread.
/// Errors: kUnavailable: UCX found no usable transport here; kInvalidArgument: an option is zero or negative.
Result<std::unique_ptr<Transport>> make_ucx_transport(const UcxOptions& options);
/// Errors as above.
Result<std::unique_ptr<Transport>> make_shm_transport(const ShmOptions& options);
/// kUnavailable: the address can't be bound.
Result<std::unique_ptr<Transport>> make_tcp_transport(const TcpOptions& options);

/// kUnavailable: this build has no CUDA, NCCL can't be loaded (and what to install), or the address can't be bound.
Result<std::unique_ptr<Transport>> make_nccl_transport(const NcclOptions& options);

/// kUnavailable: the device gives no stream.
Result<std::unique_ptr<Transport>> make_gpu_ipc_transport(const GpuIpcOptions& options);

/// What may carry bytes. kAuto: what is fastest, measured for each peer when it is connected.
enum class Path : std::uint8_t { kAuto, kShm, kCma, kUcx, kTcp, kNccl, kGpuIpc };
/// kInvalidArgument: names the ones that are allowed.
Result<Path> parse_path(std::string_view name);
std::string_view name_of(Path path);

struct TransportOptions {
  Path path = Path::kAuto;
  CommonOptions common;
  TcpOptions tcp;            // its CommonOptions are not read
  Device* device = nullptr;  // whose memory is registered as well; outlives the transport
};

/// All of the above behind one address, with a planner in front.
Result<std::unique_ptr<Transport>> make_transport(const TransportOptions& options);

}  // namespace kvferry
