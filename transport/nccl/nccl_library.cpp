// The only file that includes NCCL's header. It also includes CUDA's, since NCCL's callers must set the current device.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "transport/base/log.h"
#include "transport/nccl/communicators.h"

namespace kvferry::nccl {
namespace {

// The first version whose point-to-point calls never block on a non-blocking communicator.
constexpr int kVersionMin = NCCL_VERSION(2, 20, 3);

// Maximum of thread blocks, and so of the GPU's multiprocessors, that a communicator's kernels occupy while they run.
// By itself NCCL may use more. NCCL_MAX_CTAS, which the user may set, has priority.
constexpr int kCtasMax = 8;

std::string version_name(int version) {
  return fmt::format("{}.{}.{}", version / 10'000, version / 100 % 100, version % 100);
}

/// NCCL's functions. The library stays loaded, since NCCL has threads of its own.
struct Api {
  decltype(&::ncclGetVersion) get_version = nullptr;
  decltype(&::ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&::ncclCommInitRankConfig) init_rank = nullptr;
  decltype(&::ncclCommAbort) abort = nullptr;
  decltype(&::ncclCommGetAsyncError) get_async_error = nullptr;
  decltype(&::ncclGetErrorString) error_string = nullptr;
  decltype(&::ncclGetLastError) last_error = nullptr;
  decltype(&::ncclGroupStart) group_start = nullptr;
  decltype(&::ncclGroupEnd) group_end = nullptr;
  decltype(&::ncclSend) send = nullptr;
  decltype(&::ncclRecv) receive = nullptr;
  int version = 0;
};

Error unavailable(const std::string& what) {
  return {
      ErrorCode::kUnavailable,
      fmt::format("NCCL can't be used: {}; install it with `pip install nvidia-nccl-cu13` and name its libnccl.so.2 "
                  "in KVFERRY_NCCL_LIBRARY",
                  what)};
}

Result<Api> load(const std::string& wanted) {
  const char* const named = std::getenv("KVFERRY_NCCL_LIBRARY");
  const std::string path = !wanted.empty() ? wanted : named != nullptr && *named != '\0' ? named : "libnccl.so.2";
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return unavailable(::dlerror());
  Api api;
  const char* missing = nullptr;
  const auto find = [&]<class Function>(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    if (function == nullptr && missing == nullptr) missing = name;
  };
  find(api.get_version, "ncclGetVersion");
  find(api.get_unique_id, "ncclGetUniqueId");
  find(api.init_rank, "ncclCommInitRankConfig");
  find(api.abort, "ncclCommAbort");
  find(api.get_async_error, "ncclCommGetAsyncError");
  find(api.error_string, "ncclGetErrorString");
  find(api.last_error, "ncclGetLastError");
  find(api.group_start, "ncclGroupStart");
  find(api.group_end, "ncclGroupEnd");
  find(api.send, "ncclSend");
  find(api.receive, "ncclRecv");
  if (missing != nullptr) return unavailable(fmt::format("{} has no function {}", path, missing));
  if (api.get_version(&api.version) != ncclSuccess || api.version < kVersionMin)
    return unavailable(fmt::format("{} is version {}, and {} or later is needed", path, version_name(api.version),
                                   version_name(kVersionMin)));
  return api;
}

bool is_under_way(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const Api& api, int device, ncclComm_t communicator, int rank)
      : api_(api), device_(device), communicator_(communicator), peer_(1 - rank) {}
  ~NcclCommunicator() override {
    abort();
    aborter_.join();
  }

  State state() override {
    if (aborter_.joinable()) return is_aborted_ ? State::kAborted : State::kBusy;
    if (!why_.empty()) return State::kFailed;
    ncclResult_t outcome = ncclSuccess;
    ncclResult_t asked = api_.get_async_error(communicator_, &outcome);
    if (asked == ncclSuccess) asked = outcome;
    if (asked == ncclInProgress) return State::kBusy;
    if (asked == ncclSuccess) return State::kReady;
    fail(asked);
    return State::kFailed;
  }
  std::string why() const override { return why_; }

  Result<void> send(std::span<const std::span<std::byte>> parts, DeviceStream stream) override {
    return run_group(parts, [&](std::span<std::byte> part) {
      return api_.send(part.data(), part.size(), ncclUint8, peer_, communicator_, static_cast<cudaStream_t>(stream));
    });
  }
  Result<void> receive(std::span<const std::span<std::byte>> parts, DeviceStream stream) override {
    return run_group(parts, [&](std::span<std::byte> part) {
      return api_.receive(part.data(), part.size(), ncclUint8, peer_, communicator_, static_cast<cudaStream_t>(stream));
    });
  }

  /// Aborts on a thread of its own, because NCCL's function waits for kernels and for NCCL's own threads.
  void abort() override {
    if (aborter_.joinable()) return;
    aborter_ = std::thread([this] {
      ::cudaSetDevice(device_);
      if (const ncclResult_t result = api_.abort(communicator_); result != ncclSuccess)
        log().warn("nccl: NCCL reported an error when a communicator was aborted: {}", api_.error_string(result));
      is_aborted_ = true;
    });
  }

 private:
  template <class Call>
  Result<void> run_group(std::span<const std::span<std::byte>> parts, Call call) {
    ::cudaSetDevice(device_);
    ncclResult_t result = api_.group_start();
    for (const std::span<std::byte>& part : parts) {
      if (is_under_way(result)) result = call(part);
    }
    const ncclResult_t ended = api_.group_end();
    if (is_under_way(result)) result = ended;
    if (is_under_way(result)) return {};
    fail(result);
    return Error{ErrorCode::kPeerLost, why_};
  }
  void fail(ncclResult_t result) {
    const char* const detail = api_.last_error(communicator_);
    const bool has_detail = detail != nullptr && *detail != '\0';
    why_ = fmt::format("NCCL: {}{}", api_.error_string(result), has_detail ? fmt::format(" ({})", detail) : "");
  }

  const Api api_;
  const int device_;
  const ncclComm_t communicator_;
  const int peer_;
  std::string why_;
  std::thread aborter_;
  std::atomic<bool> is_aborted_{false};
};

class NcclCommunicators final : public Communicators {
 public:
  NcclCommunicators(const Api& api, int device) : api_(api), device_(device) {}

  std::string describe() const override { return "NCCL " + version_name(api_.version); }

  Result<std::string> make_id() override {
    ncclUniqueId id;
    const ncclResult_t result = api_.get_unique_id(&id);
    if (result != ncclSuccess)
      return Error{ErrorCode::kUnavailable,
                   fmt::format("NCCL cannot create the id of a communicator: {}", api_.error_string(result))};
    return std::string(id.internal, sizeof(id.internal));
  }

  Result<std::unique_ptr<Communicator>> begin(const std::string& id, int rank) override {
    ncclUniqueId unique;
    if (id.size() != sizeof(unique.internal))
      return Error{ErrorCode::kCorrupt, fmt::format("the peer sent an NCCL id of {} bytes, but an NCCL id has {} bytes",
                                                    id.size(), sizeof(unique.internal))};
    std::memcpy(unique.internal, id.data(), id.size());
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    // The speed of transfers is limited by the link between the two ranks and not by the number of multiprocessors that
    // copy, and the model needs the multiprocessors.
    config.maxCTAs = kCtasMax;
    ::cudaSetDevice(device_);
    ncclComm_t communicator = nullptr;
    const ncclResult_t result = api_.init_rank(&communicator, 2, unique, rank, &config);
    if (communicator == nullptr)
      return Error{ErrorCode::kUnavailable,
                   fmt::format("NCCL cannot begin a communicator: {}", api_.error_string(result))};
    return std::unique_ptr<Communicator>(std::make_unique<NcclCommunicator>(api_, device_, communicator, rank));
  }

 private:
  const Api api_;
  const int device_;
};

/// Returns CUDA's ordinal of the device, read from the attributes of memory that is allocated there.
Result<int> ordinal_of(Device& device) {
  std::byte* const memory = KVFERRY_TRY(device.allocate(MemoryKind::kDevice, 1));
  cudaPointerAttributes attributes{};
  const cudaError_t result = ::cudaPointerGetAttributes(&attributes, memory);
  device.release(MemoryKind::kDevice, memory);
  if (result != cudaSuccess || attributes.type != cudaMemoryTypeDevice)
    return Error{ErrorCode::kUnavailable,
                 fmt::format("NCCL needs a CUDA device, but {} is not one: {}", device.describe(),
                             result != cudaSuccess ? ::cudaGetErrorString(result) : "CUDA does not know its memory")};
  return attributes.device;
}

}  // namespace

Result<std::unique_ptr<Communicators>> open_nccl(const std::string& path, Device& device) {
  const Api api = KVFERRY_TRY(load(path));
  const int ordinal = KVFERRY_TRY(ordinal_of(device));
  auto communicators = std::make_unique<NcclCommunicators>(api, ordinal);
  // Making the first id initialises NCCL, which may take long, so it is done here and not on the progress thread.
  if (Result<std::string> id = communicators->make_id(); !id) return std::move(id).error();
  return std::unique_ptr<Communicators>(std::move(communicators));
}

Result<std::string> find_nccl(const std::string& path) {
  return "NCCL " + version_name(KVFERRY_TRY(load(path)).version);
}

}  // namespace kvferry::nccl
