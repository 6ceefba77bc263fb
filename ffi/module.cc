// The Python module pk_jax._ffi: handlers for registration with XLA, facts about this machine, the
// test harness. No JAX import here.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ffi/attention.h"
#include "ffi/attention_backward.h"
#include "ffi/call_site.h"
#include "ffi/collectives.h"
#include "ffi/custom_op_loader.h"
#include "ffi/gather_walk_python.h"
#include "ffi/matmul.h"
#include "ffi/noop.h"
#include "ffi/ragged_dot.h"
#include "ffi/timeline_python.h"
#include "ffi/virtual_ranks_python.h"
#include "kernels/few_rows.h"
#include "kernels/matmul_reduce.h"
#include "mechanism/copy_engine.h"
#include "runtime/error_log.h"
#include "runtime/process.h"
#include "runtime/topology.h"
#include "schedule/attention_walk.h"
#include "schedule/matmul_walk.h"
#include "schedule/scatter_walk.h"
#include "schedule/strip_layout.h"
#include "tile/comm_view.h"
#include "tile/row_tiles.h"
#include "tile/timeline.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

namespace {

nb::capsule handler(XLA_FFI_Error* (*function)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(function));
}

std::string version(int cuda_version) {
  return std::to_string(cuda_version / 1000) + "." + std::to_string(cuda_version % 1000 / 10);
}

nb::dict handlers() {
  nb::dict all;
  const auto collective = [&](const char* target, auto instantiate, auto execute) {
    nb::dict stages;
    stages["instantiate"] = handler(instantiate);
    stages["prepare"] = handler(pk::pk_call_site_prepare);
    stages["initialize"] = handler(pk::pk_call_site_initialize);
    stages["execute"] = handler(execute);
    all[target] = stages;
  };
  collective("pk_jax_all_gather", pk::pk_all_gather_instantiate, pk::pk_all_gather_execute);
  collective("pk_jax_all_gather_matmul", pk::pk_all_gather_matmul_instantiate,
             pk::pk_all_gather_matmul_execute);
  collective("pk_jax_all_to_all", pk::pk_all_to_all_instantiate, pk::pk_all_to_all_execute);
  collective("pk_jax_ppermute", pk::pk_ppermute_instantiate, pk::pk_ppermute_execute);
  collective("pk_jax_psum", pk::pk_psum_instantiate, pk::pk_psum_execute);
  collective("pk_jax_psum_scatter", pk::pk_psum_scatter_instantiate, pk::pk_psum_scatter_execute);
  collective("pk_jax_ragged_all_to_all", pk::pk_ragged_all_to_all_instantiate,
             pk::pk_ragged_all_to_all_execute);
  collective("pk_jax_matmul_reduce_scatter", pk::pk_matmul_reduce_scatter_instantiate,
             pk::pk_matmul_reduce_scatter_execute);
  collective("pk_jax_matmul_all_reduce", pk::pk_matmul_all_reduce_instantiate,
             pk::pk_matmul_all_reduce_execute);
  collective("pk_jax_matmul_reduce_scatter_few_rows", pk::pk_few_rows_reduce_scatter_instantiate,
             pk::pk_few_rows_execute);
  collective("pk_jax_matmul_all_reduce_few_rows", pk::pk_few_rows_all_reduce_instantiate,
             pk::pk_few_rows_execute);
  nb::dict matmul;
  matmul["initialize"] = handler(pk::pk_matmul_initialize);
  matmul["execute"] = handler(pk::pk_matmul_execute);
  all["pk_jax_matmul"] = matmul;
  nb::dict ragged_dot;
  ragged_dot["initialize"] = handler(pk::pk_ragged_dot_initialize);
  ragged_dot["execute"] = handler(pk::pk_ragged_dot_execute);
  all["pk_jax_ragged_dot"] = ragged_dot;
  nb::dict attention;
  attention["initialize"] = handler(pk::pk_attention_initialize);
  attention["execute"] = handler(pk::pk_attention_execute);
  all["pk_jax_attention"] = attention;
  nb::dict attention_backward;
  attention_backward["initialize"] = handler(pk::pk_attention_backward_initialize);
  attention_backward["execute"] = handler(pk::pk_attention_backward_execute);
  all["pk_jax_attention_backward"] = attention_backward;
  nb::dict noop;
  noop["execute"] = handler(pk::pk_noop_execute);
  all["pk_jax_noop"] = noop;
  for (const auto& [name, execute] : pk::custom_ops())
    collective(("pk_jax_" + name).c_str(), pk::pk_custom_op_instantiate, execute);
  return all;
}

// Targets of the ops that a library brought.
std::vector<std::string> load_ops(const std::string& path, const std::vector<std::string>& taken) {
  std::vector<std::string> targets;
  for (const std::string& name : pk::load_custom_ops(path, {taken.begin(), taken.end()}))
    targets.push_back("pk_jax_" + name);
  return targets;
}

nb::dict types() {
  nb::dict site;
  site["type_id"] = nb::capsule(static_cast<void*>(pk::call_site_type_id()));
  site["type_info"] =
      nb::capsule(const_cast<void*>(static_cast<const void*>(pk::call_site_type_info())));
  nb::dict all;
  all["pk_jax_call_site"] = site;
  return all;
}

nb::dict build_info() {
  nb::dict info;
  info["version"] = PK_JAX_VERSION;
  info["arch"] = PK_JAX_ARCH;
  info["cuda_runtime"] = version(CUDART_VERSION);
  info["timeline"] = pk::timeline::kRecorded;
  info["ffi_api"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  nb::dict limits;  // what pk_jax/ repeats, for a test to compare
  limits["ranks"] = pk::kMaxRanks;
  limits["channels"] = pk::kNumChannels;
  nb::list ll_bytes;  // [num_ranks]
  for (int ranks = 0; ranks <= pk::kMaxRanks; ++ranks)
    ll_bytes.append(ranks == 0 ? 0 : pk::low_latency_bytes(ranks));
  limits["ll_bytes"] = ll_bytes;
  limits["blocks"] = pk::kMaxBlocks;
  limits["tile_flags"] = pk::kTileFlags;
  limits["few_rows"] = pk::kMostFewRows;
  limits["matmul_reduce_ranks"] = pk::kMatmulReduceRanks;
  limits["few_rows_ranks"] = pk::kFewRowsRanks;
  limits["chunks"] = pk::kChunks;
  limits["chunk_bytes_min"] = pk::kLeastChunkBytes;
  limits["chunk_bytes_max"] = pk::kMostChunkBytes;
  info["limits"] = limits;
  return info;
}

nb::list matrix(const std::vector<std::vector<bool>>& rows) {
  nb::list out;
  for (const std::vector<bool>& row : rows) {
    nb::list line;
    for (bool value : row) line.append(nb::bool_(value));
    out.append(line);
  }
  return out;
}

nb::dict topology() {
  const pk::Topology& found = pk::Topology::get();
  nb::list devices;
  for (const pk::DeviceInfo& info : found.devices) {
    nb::dict device;
    device["ordinal"] = info.ordinal;
    device["name"] = info.name;
    device["uuid"] = info.uuid;
    device["pci"] = info.pci;
    device["compute_capability"] = nb::make_tuple(info.major, info.minor);
    device["num_sms"] = info.num_sms;
    device["copy_engines"] = info.copy_engines;
    device["memory_bytes"] = info.memory_bytes;
    device["vmm"] = info.vmm;
    devices.append(device);
  }
  nb::dict out;
  out["driver"] = version(found.driver_version);
  out["devices"] = devices;
  out["peer_access"] = matrix(found.peer_access);
  out["nvlink"] = matrix(found.nvlink);
  return out;
}

nb::list communicators() {
  nb::list all;
  for (const pk::CommunicatorInfo& info : pk::communicators()) {
    nb::dict one;
    one["device"] = info.device;
    one["rank"] = info.rank;
    one["num_ranks"] = info.num_ranks;
    one["num_processes"] = info.num_processes;
    one["workspace_bytes"] = info.workspace_bytes;
    one["launches"] = info.launches;
    all.append(one);
  }
  return all;
}

// An Exchange whose all_gather is a Python function from bytes to the list of all ranks' bytes.
class PythonExchange : public pk::Exchange {
 public:
  PythonExchange(int rank, int num_ranks, nb::callable all_gather)
      : rank_(rank), num_ranks_(num_ranks), all_gather_(std::move(all_gather)) {}
  int rank() const override { return rank_; }
  int num_ranks() const override { return num_ranks_; }
  void all_gather(const void* mine, void* all, size_t bytes) override {
    const nb::list parts(all_gather_(nb::bytes(mine, bytes)));
    for (int r = 0; r < num_ranks_; ++r) {
      const auto part = nb::cast<nb::bytes>(parts[r]);
      if (part.size() != bytes) throw pk::Error("ranks exchange parts of different sizes");
      std::memcpy(static_cast<char*>(all) + r * bytes, part.c_str(), bytes);
    }
  }
  using Exchange::all_gather;

 private:
  int rank_, num_ranks_;
  nb::callable all_gather_;
};

// What a communicator does to share memory between processes, with any descriptor and no GPU.
std::vector<int> exchange_descriptors(nb::callable all_gather, int rank, int num_ranks, int fd) {
  PythonExchange exchange(rank, num_ranks, std::move(all_gather));
  const auto placements = exchange.all_gather(pk::Placement{0, pk::process_id(), 0});
  pk::Descriptor mine(dup(fd));
  std::vector<int> received;
  for (pk::Descriptor& descriptor : pk::exchange_descriptors(exchange, placements, mine)) {
    received.push_back(descriptor ? dup(descriptor.get()) : -1);
  }
  return received;
}

// (row, col, num_rows, num_cols) of every tile of a walk.
std::vector<std::array<int64_t, 4>> tiles_of(const pk::RowTiles& walk) {
  std::vector<std::array<int64_t, 4>> out;
  for (int64_t i = 0; i < walk.num_tiles; ++i) {
    const pk::RowTile tile = walk.tile(i);
    out.push_back({tile.row, tile.col, tile.num_rows, tile.num_cols});
  }
  return out;
}

// (m, n, first step, last step + 1) of each part of each block, in its order.
std::vector<std::vector<std::array<int, 4>>> parts_of(const pk::MatmulWalk& walk) {
  std::vector<std::vector<std::array<int, 4>>> out(walk.num_blocks);
  for (int block = 0; block < walk.num_blocks; ++block) {
    for (int i = 0; i < walk.num_parts(block); ++i) {
      const pk::MatmulWalk::Part part = walk.part(block, i);
      out[block].push_back({part.m, part.n, part.begin, part.begin + part.num_steps});
    }
  }
  return out;
}

// (owner, m, n, number of the tile) of each part of each block, in its order.
std::vector<std::vector<std::array<int, 4>>> scattered_tiles(const pk::ScatterWalk& walk) {
  std::vector<std::vector<std::array<int, 4>>> out(walk.tiles.num_blocks);
  for (int block = 0; block < walk.tiles.num_blocks; ++block) {
    pk::ScatterWalk::Parts parts(walk, block);
    for (auto part = parts.next(); part.num_steps > 0; part = parts.next())
      out[block].push_back({part.owner, part.m, part.n, part.tile});
  }
  return out;
}

// (head, tile of its rows) of each tile, in order.
std::vector<std::array<int, 2>> tiles_of(const pk::AttentionWalk& walk) {
  std::vector<std::array<int, 2>> out;
  for (int number = 0; number < walk.num_tiles(); ++number) {
    const pk::AttentionWalk::Tile tile = walk.tile(number);
    out.push_back({tile.head, tile.row});
  }
  return out;
}

}  // namespace

NB_MODULE(_ffi, m) {
  m.def("handlers", &handlers,
        "Target name -> {stage: capsule}, for jax.ffi.register_ffi_target on platform CUDA.");
  m.def("load_ops", &load_ops, nb::arg("path"), nb::arg("taken"),
        "Opens a library of custom ops and returns the targets that handlers() has gained. "
        "RuntimeError if it does not fit this library, or has an op of a name that is taken.");
  m.def("types", &types,
        "Type name -> {type_id, type_info}, for jax.ffi.register_ffi_type, before the handlers.");
  m.def("build_info", &build_info, "What this library was built with.");
  m.def("topology", &topology,
        "GPUs of this process and the links between them. RuntimeError without driver or GPU.");
  m.def("set_local_devices", &pk::set_local_devices, nb::arg("global_id_of"),
        "Local hardware ordinal -> global JAX device id, before the first lowering for CUDA.");
  m.def("host_id", &pk::host_id, "Equal exactly for processes that can map each other's memory.");
  m.def("last_error", &pk::error_text,
        "Text of the device error record, None if no kernel has given up.");
  m.def("communicators", &communicators, "The communicators that are alive.");
  pk::bind_virtual_ranks(m);
  pk::bind_timeline(m);
  pk::bind_gather_walk(m);
  m.def("exchange_descriptors", &exchange_descriptors, nb::arg("all_gather"), nb::arg("rank"),
        nb::arg("num_ranks"), nb::arg("fd"),
        "Hands fd to every other process and returns theirs (-1 for this process), for tests.");
  m.def(
      "row_tiles",
      [](int64_t rows, int64_t inner, uint32_t tile_bytes) {
        return tiles_of(pk::RowTiles::make(rows, inner, tile_bytes));
      },
      nb::arg("rows"), nb::arg("inner"), nb::arg("tile_bytes"),
      "The kernels' walk over a matrix of bytes: (row, col, num_rows, num_cols) of each tile.");
  m.def(
      "chunk_walk",
      [](int64_t rows, int64_t inner) { return tiles_of(pk::chunk_walk(rows, inner)); },
      nb::arg("rows"), nb::arg("inner"), "The same for the copy engine's chunks.");
  m.def(
      "matmul_walk",
      [](int num_m, int num_n, int num_steps, int num_blocks, int split_tiles, int split,
         int band_rows) {
        const pk::MatmulWalk walk{num_m,       num_n, num_steps, num_blocks,
                                  split_tiles, split, band_rows};
        if (!walk.is_valid()) throw nb::value_error("blocks cannot share tiles so");
        return parts_of(walk);
      },
      nb::arg("num_m"), nb::arg("num_n"), nb::arg("num_steps"), nb::arg("num_blocks"),
      nb::arg("split_tiles") = 0, nb::arg("split") = 1, nb::arg("band_rows") = 16,
      "The walk of a matrix product: (m, n, first step, end) of each block's parts, in its "
      "order.");
  m.def(
      "attention_walk",
      [](int num_rows, int num_heads, int band_heads, bool from_last) {
        const pk::AttentionWalk walk{num_rows, num_heads, band_heads, from_last};
        if (!walk.is_valid()) throw nb::value_error("there is no such walk");
        return tiles_of(walk);
      },
      nb::arg("num_rows"), nb::arg("num_heads"), nb::arg("band_heads"),
      nb::arg("from_last") = false,
      "The walk of attention: (head, tile of its rows) of each tile, in order.");
  m.def(
      "scatter_walk",
      [](int num_m, int num_n, int num_ranks, int rank, int num_blocks, int lead) {
        if (num_ranks > pk::ScatterWalk::kMostRanks) throw nb::value_error("too many ranks");
        const pk::MatmulWalk tiles{num_m, num_n, 1, num_blocks, 0, 1, 16};
        return scattered_tiles(pk::ScatterWalk::make(tiles, num_ranks, rank, 0, lead));
      },
      nb::arg("num_m"), nb::arg("num_n"), nb::arg("num_ranks"), nb::arg("rank"),
      nb::arg("num_blocks"), nb::arg("lead") = 1,
      "The walk of a product whose rows are scattered: (owner, m, n, number) of each block's "
      "tiles, in its order.");
  m.def("matmul_reduce_scratch", &pk::matmul_reduce_scratch, nb::arg("m"), nb::arg("p"),
        nb::arg("num_ranks"), nb::arg("all_reduce"),
        "Bytes of scratch that matmul_reduce_scatter and matmul_all_reduce need.");
  m.def(
      "strips",
      [](int m, int num_ranks, bool all_reduce, int cols) {
        const auto layout = pk::StripLayout::make(m, num_ranks, all_reduce);
        std::vector<std::array<int, 5>> out;
        for (int owner = 0; owner < num_ranks; ++owner) {
          for (int n = 0; n * pk::StripLayout::kCols < cols; ++n) {
            for (int row = 0; row < m; row += pk::StripLayout::kRows) {
              if (layout.goes_to(owner, row, pk::StripLayout::kRows))
                out.push_back({owner, row, n, layout.number(owner, row, n),
                               layout.first_number(owner, row - pk::StripLayout::kRows, n)});
            }
          }
        }
        return std::make_tuple(layout.num_strips(cols), out);
      },
      nb::arg("m"), nb::arg("num_ranks"), nb::arg("all_reduce"), nb::arg("cols"),
      "How many strips of few rows a rank sends an owner at most; (owner, row, n, number, number "
      "of the first from 8 rows before on) of each.");
  m.def("few_rows_scratch", &pk::few_rows_scratch, nb::arg("m"), nb::arg("p"), nb::arg("num_ranks"),
        nb::arg("all_reduce"), nb::arg("low_latency"), "The same of few rows.");
  m.def("few_rows_most_cols", &pk::few_rows_most_cols, nb::arg("m"), nb::arg("num_ranks"),
        nb::arg("all_reduce"), nb::arg("low_latency"), "The most columns that those may have.");
}
