// The jobs of one launch, small enough to be a parameter of the kernel, so that a pass needs no memory on the device
// and no copy before its first launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "kernels/device/pack_plan.h"
#include "kernels/device/segment_hash.h"

namespace kvferry::cuda {

/// Some of a pass's jobs, with chunks in one kind of memory, and those jobs' block tables unless job.tables is set.
class PackJobs {
 public:
  explicit PackJobs(bool in_host_memory) : in_host_memory_(in_host_memory) {}
  /// Adds a job whose tables have `entries`. If job.tables is null, this object keeps a copy of the entries; otherwise
  /// job.tables points to them, in memory that the device can read. Returns false if there is no room.
  bool add(const device::PackJob& job, std::span<const std::int32_t> entries) {
    const std::size_t table = job.tables == nullptr ? entries.size_bytes() : 0;
    if ((num_jobs_ + 1) * sizeof(Entry) + tables_ + table > kBytes) return false;
    tables_ += static_cast<std::uint32_t>(table);
    if (table > 0) std::memcpy(bytes_ + kBytes - tables_, entries.data(), table);
    const Entry entry{job, kBytes - tables_};
    std::memcpy(bytes_ + num_jobs_ * sizeof entry, &entry, sizeof entry);
    ++num_jobs_;
    return true;
  }
  /// Returns true if a table with this many entries has room beside a single job.
  static bool can_hold(std::size_t num_entries) {
    return num_entries <= (kBytes - sizeof(Entry)) / sizeof(std::int32_t);
  }
  std::uint32_t size() const { return num_jobs_; }
  /// Returns true if the chunks are in host memory, false if they are in the GPU's.
  bool in_host_memory() const { return in_host_memory_; }

  KVFERRY_DEVICE device::PackJob at(std::uint32_t index) const {
    const Entry& entry = reinterpret_cast<const Entry*>(bytes_)[index];
    device::PackJob job = entry.job;
    if (job.tables == nullptr) job.tables = reinterpret_cast<const std::int32_t*>(bytes_ + entry.table_at);
    return job;
  }

 private:
  struct alignas(8) Entry {
    device::PackJob job;
    std::uint32_t table_at;  // position of the job's entries in bytes_, unless job.tables says where they are
  };
  // Room for 68 chunks of 256 tokens in blocks of 16, if there is one KV group. CUDA allows parameters of 32,764 bytes.
  static constexpr std::uint32_t kBytes = 8 << 10;

  alignas(16) std::byte bytes_[kBytes];  // job entries grow from the start, tables from the end
  std::uint32_t num_jobs_ = 0, tables_ = 0;
  bool in_host_memory_;
};

/// Bytes that the device can access and whose checksum segments it must hash, all in one kind of memory.
struct HashJobs {
  struct Job {
    const std::byte* bytes;
    std::uint64_t num_bytes;
    std::uint64_t* segments;
  };
  static constexpr std::uint32_t kMax = 128;
  Job jobs[kMax];
  std::uint32_t num_jobs = 0;
  bool in_host_memory = false;
};

}  // namespace kvferry::cuda
