// The calling thread's current GPU. Private to this folder.
#pragma once

namespace kvferry {

/// Returns whether this process has the GPU's primary context. Does not make it.
bool has_context(int ordinal);

/// Makes a GPU current during its lifetime, and then the GPU that the thread had before. If this process has no context
/// on that one, the thread keeps `ordinal`: cudaSetDevice() makes a context, which takes some 500 MiB of the GPU.
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
