// What every GPU test checks at its end.
#pragma once

#include <string>
#include <vector>

namespace kvferry {

/// Returns a text for each kind of thing that was made in CUDA and not given back, such as "cuda:0: 2 events". CUDA
/// itself tells only of memory of pools.
std::vector<std::string> cuda_leaks();

}  // namespace kvferry
