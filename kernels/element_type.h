// The types of KV elements.
#pragma once

#include <cstdint>

namespace kvferry {

/// What an element is, where that matters: kBytes are copied as they are, whatever they mean.
enum class ElementType : std::uint8_t { kBytes, kBf16, kFp16, kFp32, kE4m3, kE5m2 };

}  // namespace kvferry
