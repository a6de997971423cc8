// The outputs of a benchmark: a file of JSON figures, with the machine's facts, and the picture that a script draws.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "launch/bench/harness/programs.h"

namespace kvferry::bench {

/// {"version", "boot_id", "cores", "cpu", "kernel", "huge_pages", "date"}; a fact that can't be read is empty.
nlohmann::json host_facts();

/// Writes the figures into `name`, or nothing if `name` is empty. Failure kUnavailable: the file can't be written.
void write_json(const std::string& name, const nlohmann::json& figures);

/// A figure with so many digits, in a unit; "-" if it is missing.
std::string number_text(const nlohmann::json& figures, const std::string& name, int digits, double unit = 1);

/// Does a part of the run that can be left out. An error, other than kCancelled, is a warning to `say` and the reason
/// for `name` in `missing`.
void try_part(const std::string& name, nlohmann::json& missing, const Say& say, const std::function<void()>& part);

/// Draws the figures into `name` (.png) with peers/plots.py's drawing `kind`, or nothing if `name` is empty; installs
/// matplotlib on demand. A picture that can't be drawn is a warning to `say`. Failure: kCancelled.
void draw(const std::string& name, const std::string& kind, const nlohmann::json& figures, const Say& say);

}  // namespace kvferry::bench
