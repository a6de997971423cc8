// Selects the classes that copy and convert elements by the elements' types.
#pragma once

#include <type_traits>

#include "kernels/device/copy_elements.h"
#include "kernels/device/element.h"
#include "kernels/device/vec_format.h"
#include "kernels/element_type.h"

namespace kvferry {

/// Calls `call` with an object of the class that converts elements of this type, unless the type is kBytes.
template <class Call>
void with_element_type(ElementType type, Call call) {
  if (type == ElementType::kBf16) call(device::Bf16{});
  if (type == ElementType::kFp16) call(device::Fp16{});
  if (type == ElementType::kFp32) call(device::Fp32{});
  if (type == ElementType::kE4m3) call(device::E4m3{});
  if (type == ElementType::kE5m2) call(device::E5m2{});
}

/// Calls call(Format{}, Element{}) with the classes that copy elements between cache and chunk. Format is NoFormat
/// if elements are converted to a chunk type other than fp8. `call` is not called for pairs that resolve() rejects.
template <class Call>
void with_format(ElementType cache_type, ElementType chunk_type, Call call) {
  if (cache_type == chunk_type) return call(device::SameBytes{}, device::SameElement{});
  with_element_type(cache_type, [&]<class Cache>(Cache) {
    with_element_type(chunk_type, [&]<class Chunk>(Chunk) {
      constexpr bool from_fp8 = sizeof(typename Cache::Storage) == 1, to_fp8 = sizeof(typename Chunk::Storage) == 1;
      if constexpr (to_fp8 && !from_fp8)
        call(device::Converted<Cache, Chunk>{}, device::ConvertedElement<Cache, Chunk>{});
      else if constexpr (!to_fp8 && !std::is_same_v<Cache, Chunk>)
        call(device::NoFormat{}, device::ConvertedElement<Cache, Chunk>{});
    });
  });
}

}  // namespace kvferry
