// The calling thread's current GPU. Private to this folder.
#pragma once

namespace kvferry {

/// Returns whether this process has the GPU's primary context. Does not make the context.
bool has_context(int ordinal);

/// Makes a GPU the calling thread's current one as long as this object exists, and then restores the GPU that the
/// thread had before. If this process has no context on that former GPU, the thread keeps `ordinal` instead, because
/// cudaSetDevice() would make a context, which takes some 500 MiB of the former GPU.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal);
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice();

 private:
  int before_ = 0;
  bool is_changed_ = false;
};

}  // namespace kvferry
