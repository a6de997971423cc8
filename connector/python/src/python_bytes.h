#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>

inline nanobind::bytes to_bytes(const std::string& text) { return nanobind::bytes(text.data(), text.size()); }
inline std::string_view view(const nanobind::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }
