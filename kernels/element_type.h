// The types that elements of KV may have.
#pragma once

#include <cstdint>

namespace kvferry {

/// Type of an element, for conversions; elements of kBytes are copied unchanged.
enum class ElementType : std::uint8_t { kBytes, kBf16, kFp16, kFp32, kE4m3, kE5m2 };

}  // namespace kvferry
