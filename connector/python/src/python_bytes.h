#pragma once

#include <nanobind/nanobind.h>

#include <string>

inline nanobind::bytes to_bytes(const std::string& text) { return nanobind::bytes(text.data(), text.size()); }
