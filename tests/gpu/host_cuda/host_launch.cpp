// The launches of kernels/cuda/launch.cu as work of the simulated GPU, which runs the same device code lane by lane.
#include <utility>

#include "kernels/cuda/launch.h"
#include "tests/gpu/host_cuda/simulated.h"
#include "tests/kernels/emulated_launch.h"

namespace kvferry::cuda {
namespace {

template <class Work>
cudaError_t enqueue(cudaStream_t stream, Work work) {
  return launched([&] {
    host_cuda::launch(stream, [work = std::move(work)] {
      work();
      return true;
    });
  });
}

cudaError_t launch_each(const Launch& launch, const PackJobs& jobs, ElementType cache_type, ElementType chunk_type,
                        cudaStream_t stream, void (*run)(const EmulatedLaunch&, const device::PackJob&)) {
  return enqueue(stream, [launch, jobs, cache_type, chunk_type, run] {
    const EmulatedLaunch emulated{launch.plan, launch.layers, cache_type, chunk_type, launch.secret};
    for (std::uint32_t job = 0; job < jobs.size(); ++job) run(emulated, jobs.at(job));
  });
}

}  // namespace

cudaError_t launch_gather(const Launch& launch, const PackJobs& jobs, ElementType cache_type, ElementType chunk_type,
                          bool hashes, cudaStream_t stream) {
  return launch_each(
      launch, jobs, cache_type, chunk_type, stream,
      hashes ? [](const EmulatedLaunch& how, const device::PackJob& job) { emulate_copy(how, job, true, true); }
             : [](const EmulatedLaunch& how, const device::PackJob& job) { emulate_copy(how, job, true, false); });
}

cudaError_t launch_scatter(const Launch& launch, const PackJobs& jobs, ElementType cache_type, ElementType chunk_type,
                           bool hashes, cudaStream_t stream) {
  return launch_each(
      launch, jobs, cache_type, chunk_type, stream,
      hashes ? [](const EmulatedLaunch& how, const device::PackJob& job) { emulate_copy(how, job, false, true); }
             : [](const EmulatedLaunch& how, const device::PackJob& job) { emulate_copy(how, job, false, false); });
}

cudaError_t launch_elements(const Launch& launch, const PackJobs& jobs, ElementType cache_type, ElementType chunk_type,
                            bool gathers, cudaStream_t stream) {
  return launch_each(
      launch, jobs, cache_type, chunk_type, stream,
      gathers ? [](const EmulatedLaunch& how, const device::PackJob& job) { emulate_elements(how, job, true); }
              : [](const EmulatedLaunch& how, const device::PackJob& job) { emulate_elements(how, job, false); });
}

cudaError_t launch_hash(const HashJobs& jobs, const device::SegmentSecret& secret, cudaStream_t stream) {
  return enqueue(stream, [jobs, secret] {
    for (std::uint32_t job = 0; job < jobs.num_jobs; ++job)
      emulate_hash(secret, jobs.jobs[job].bytes, jobs.jobs[job].num_bytes, jobs.jobs[job].segments);
  });
}

cudaError_t launch_ranges(const RangeJob* jobs, std::uint32_t num_jobs, std::uint64_t, cudaStream_t stream) {
  return enqueue(stream, [jobs, num_jobs] {
    for (std::uint32_t job = 0; job < num_jobs; ++job)
      emulate_ranges(jobs[job].to, jobs[job].from, jobs[job].num_bytes);
  });
}

}  // namespace kvferry::cuda
