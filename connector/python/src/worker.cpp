// The worker node of kvferry._core. This file only converts arguments, results and errors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "connector/python/src/node_config.h"
#include "connector/python/src/python_bytes.h"
#include "connector/python/src/python_error.h"
#include "connector/runtime/worker/worker_node.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace kvferry;

using Plane = std::tuple<std::uint64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
PlaneLayout plane_from(const Plane& plane) {
  const auto& [base, block, head, token, dim] = plane;
  return {base, block, head, token, dim};
}

/// Returns the element type that has this name in Python.
ElementType element_type(const std::string& name) {
  if (name == "bfloat16") return ElementType::kBf16;
  if (name == "float16") return ElementType::kFp16;
  if (name == "float32") return ElementType::kFp32;
  if (name == "fp8_e4m3") return ElementType::kE4m3;
  if (name == "fp8_e5m2") return ElementType::kE5m2;
  throw nb::value_error(
      fmt::format("the element type is '{}'; allowed: bfloat16, float16, float32, fp8_e4m3, fp8_e5m2", name).c_str());
}

/// first layer; [layer] its kind; [kind][part] bytes on all ranks together, place of the rank's first byte, rank's
/// bytes
using Parts = std::tuple<std::uint32_t, std::vector<std::uint32_t>,
                         std::vector<std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>>>;
ShardParts parts_from(const Parts& from) {
  const auto& [first_layer, kinds, parts] = from;
  ShardParts made{first_layer, kinds, {}};
  for (const auto& kind : parts) {
    std::vector<LayerPart>& to = made.parts.emplace_back();
    for (const auto& [whole, first, bytes] : kind) to.push_back({whole, first, bytes});
  }
  return made;
}

using Layers = std::vector<std::tuple<std::string, std::uint32_t, Plane, Plane>>;

struct PyWorker {
  std::unique_ptr<WorkerNode> node;

  PyWorker(const std::string& extra_json, std::uint32_t rank, std::string label, std::vector<KvLayout> layouts,
           std::int32_t gpu,
           const std::optional<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>>& shard,
           const std::vector<std::pair<std::string, std::string>>& types, const std::optional<Parts>& parts) {
    std::vector<ChunkFormat> formats;
    for (const auto& [cache, chunk] : types) formats.push_back({{}, element_type(cache), element_type(chunk), {}});
    const nb::gil_scoped_release unlocked;
    WorkerOptions options{config_from(extra_json), rank, std::move(label), std::move(layouts)};
    if (gpu >= 0) options.gpu = unwrap(open_gpu(gpu));
    options.formats = std::move(formats);
    if (shard) options.shard = std::apply([](auto... each) { return Shard{each...}; }, *shard);
    if (parts) options.parts = parts_from(*parts);
    node = unwrap(WorkerNode::start(std::move(options)));
  }

  std::optional<std::string> take_report() {
    const nb::gil_scoped_release unlocked;
    return node->take_report();
  }
};

}  // namespace

/// Releases the interpreter's lock during calls that may take long. The only Python objects that they use are the bytes
/// of a plan, which the caller keeps alive.
using WithoutLock = nb::call_guard<nb::gil_scoped_release>;

void bind_worker(nb::module_& m) {
  nb::class_<KvLayout>(m, "KvLayout")
      .def(
          "__init__",
          [](KvLayout* self, const Layers& layers, std::uint32_t num_kv_heads, std::uint32_t head_dim,
             std::uint32_t element_bytes, std::uint32_t planes, std::uint32_t block_tokens, std::uint32_t num_blocks) {
            KvLayout layout{{}, num_kv_heads, head_dim, element_bytes, planes, block_tokens, num_blocks};
            for (const auto& [name, group, key, value] : layers)
              layout.layers.push_back({name, group, plane_from(key), plane_from(value)});
            new (self) KvLayout(std::move(layout));
          },
          nb::kw_only(), "layers"_a, "num_kv_heads"_a, "head_dim"_a, "element_bytes"_a, "planes"_a, "block_tokens"_a,
          "num_blocks"_a);
  nb::class_<PyWorker>(m, "WorkerNode")
      .def(nb::init<const std::string&, std::uint32_t, std::string, std::vector<KvLayout>, std::int32_t,
                    const std::optional<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>>&,
                    const std::vector<std::pair<std::string, std::string>>&, const std::optional<Parts>&>(),
           nb::kw_only(), "extra_json"_a, "rank"_a, "label"_a, "layouts"_a, "gpu"_a = -1, "shard"_a = nb::none(),
           "types"_a = std::vector<std::pair<std::string, std::string>>{}, "parts"_a = nb::none(),
           "types: for each layout, the types of its elements in blocks and in chunks; empty: they are equal.\n"
           "parts: the rank's first layer, the kind of each of its layers, and of each kind the parts: their bytes on "
           "all ranks together (0: padding), the place of the rank's first byte, and the number of the rank's bytes. "
           "None: `shard` says all.")
      .def("handshake", [](const PyWorker& self) { return to_bytes(self.node->handshake()); })
      // `stream` is torch's cuda_stream: a cudaStream_t as a number, 0 for the default stream.
      .def(
          "begin_step",
          [](PyWorker& self, const nb::bytes& plan, std::uintptr_t stream) {
            unwrap(self.node->begin_step(view(plan), reinterpret_cast<DeviceStream>(stream)));
          },
          "plan"_a, "stream"_a = 0, WithoutLock())
      .def(
          "load",
          [](PyWorker& self, std::uintptr_t stream) { self.node->load(reinterpret_cast<DeviceStream>(stream)); },
          "stream"_a = 0, WithoutLock())
      .def("wants_layers", [](const PyWorker& self) { return self.node->wants_layers(); })
      .def(
          "save_layer",
          [](PyWorker& self, std::uint32_t layer, std::uintptr_t stream) {
            self.node->save_layer(layer, reinterpret_cast<DeviceStream>(stream));
          },
          "layer"_a, "stream"_a = 0, WithoutLock())
      .def(
          "save",
          [](PyWorker& self, std::uintptr_t stream) { self.node->save(reinterpret_cast<DeviceStream>(stream)); },
          "stream"_a = 0, WithoutLock())
      .def("take_report",
           [](PyWorker& self) -> std::optional<nb::bytes> {
             const std::optional<std::string> report = self.take_report();
             if (!report) return std::nullopt;
             return to_bytes(*report);
           })
      .def("take_failed_blocks", [](PyWorker& self) { return self.node->take_failed_blocks(); })
      .def(
          "take_finished_loads", [](PyWorker& self) { return self.node->take_finished_loads(); }, WithoutLock())
      .def(
          "shutdown", [](PyWorker& self) { self.node->shutdown(); }, WithoutLock());
}
