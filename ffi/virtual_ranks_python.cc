#include "ffi/virtual_ranks_python.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "ffi/launch.h"
#include "ffi/names.h"
#include "ffi/virtual_ranks.h"

namespace nb = nanobind;

namespace pk {
namespace {

using Operands = nb::ndarray<const uint8_t, nb::shape<-1, -1, -1>, nb::c_contig, nb::device::cpu>;
using Results = nb::ndarray<uint8_t, nb::shape<-1, -1, -1>, nb::c_contig, nb::device::cpu>;

// Mechanism, protocol, blocks a rank: of each call in turn.
using PlanWords = std::tuple<std::string, std::string, std::vector<int>>;

// What all ops of the harness take, in Python and here.
struct Run {
  VirtualRanks& ranks;
  Operands operands;
  Results results;
  std::vector<PlanWords> plans;
  int channel;
  int offset;
  std::vector<int> absent;

  Plan plan(int call, int rank) const {
    const auto& [mechanism, protocol, blocks] = plans[call % plans.size()];
    return {mechanism_from(mechanism), protocol_from(protocol),
            blocks.empty() ? 0 : blocks[rank % blocks.size()]};
  }

  // launch(communicator, plan, call, buffers)
  template <typename Launch>
  void go(int64_t scratch_bytes, Launch launch) const {
    const auto n = static_cast<size_t>(ranks.num_ranks());
    if (operands.shape(1) != n || results.shape(0) != operands.shape(0) || results.shape(1) != n)
      throw nb::value_error("operands and results must be [calls, ranks, bytes]");
    if (plans.empty()) throw nb::value_error("at least one plan is needed");
    VirtualRanks::Calls calls{};
    calls.count = static_cast<int>(operands.shape(0));
    calls.operand_bytes = static_cast<int64_t>(operands.shape(2));
    calls.result_bytes = static_cast<int64_t>(results.shape(2));
    calls.scratch_bytes = scratch_bytes;
    calls.channel = channel;
    calls.needs_landing = std::any_of(plans.begin(), plans.end(), [](const PlanWords& words) {
      return std::get<0>(words) == "copy_engine";
    });
    calls.offset = offset;
    calls.absent = absent;
    std::string error;
    {
      nb::gil_scoped_release release;
      error = ranks.run(
          calls, operands.data(), results.data(),
          [&](Communicator& communicator, int call, const VirtualRanks::Buffers& buffers) {
            launch(communicator, plan(call, communicator.rank()), call, buffers);
          });
    }
    if (!error.empty()) throw std::runtime_error(error);
  }

  int64_t operand_bytes() const { return static_cast<int64_t>(operands.shape(2)); }
  int64_t result_bytes() const { return static_cast<int64_t>(results.shape(2)); }

  PushArgs push_args(const Plan& plan, const VirtualRanks::Buffers& buffers) const {
    PushArgs args{};
    args.source = buffers.source;
    args.result.address = buffers.result;
    args.channel = channel;
    args.num_blocks = plan.num_blocks;
    args.num_sms = buffers.num_sms;
    return args;
  }
};

// A test that gets its sizes wrong must not write past the buffers.
void require(bool fits) {
  if (!fits) throw nb::value_error("operands, results and the other arguments do not fit");
}

void all_gather(const Run& run, int64_t rows) {
  require(rows > 0 && run.operand_bytes() % rows == 0 &&
          run.result_bytes() == run.operand_bytes() * run.ranks.num_ranks());
  run.go(0, [&](Communicator& communicator, const Plan& plan, int,
                const VirtualRanks::Buffers& buffers) {
    PushArgs args = run.push_args(plan, buffers);
    args.rows = rows;
    args.inner = run.operand_bytes() / rows;
    run_all_gather(communicator, args, run.result_bytes(), plan, buffers.stream);
  });
}

void all_to_all(const Run& run, int64_t batch, int64_t rows, bool split_first) {
  require(batch > 0 && rows > 0 && run.result_bytes() == run.operand_bytes() &&
          run.operand_bytes() % (run.ranks.num_ranks() * batch * rows) == 0);
  run.go(0, [&](Communicator& communicator, const Plan& plan, int,
                const VirtualRanks::Buffers& buffers) {
    PushArgs args = run.push_args(plan, buffers);
    args.rows = batch * rows;
    args.inner = run.operand_bytes() / communicator.num_ranks() / args.rows;
    run_all_to_all(communicator, args, batch, split_first, run.result_bytes(), plan,
                   buffers.stream);
  });
}

void ppermute(const Run& run, const std::vector<int>& destinations) {
  require(run.result_bytes() == run.operand_bytes() &&
          static_cast<int>(destinations.size()) == run.ranks.num_ranks());
  Destinations to;
  std::fill(std::begin(to.rank), std::end(to.rank), int8_t{-1});
  for (size_t r = 0; r < destinations.size(); ++r)
    to.rank[r] = static_cast<int8_t>(destinations[r]);
  run.go(0, [&](Communicator& communicator, const Plan& plan, int,
                const VirtualRanks::Buffers& buffers) {
    PushArgs args = run.push_args(plan, buffers);
    args.rows = 1;
    args.inner = run.operand_bytes();
    run_ppermute(communicator, args, to, run.result_bytes(), plan, buffers.stream);
  });
}

Element element_from(const std::string& dtype) {
  const std::pair<const char*, Element> names[] = {
      {"float32", Element::kF32}, {"float64", Element::kF64}, {"bfloat16", Element::kBF16},
      {"float16", Element::kF16}, {"int8", Element::kS8},     {"int16", Element::kS16},
      {"int32", Element::kS32},   {"int64", Element::kS64},   {"uint8", Element::kU8},
      {"uint16", Element::kU16},  {"uint32", Element::kU32},  {"uint64", Element::kU64}};
  for (const auto& [name, element] : names) {
    if (dtype == name) return element;
  }
  throw nb::value_error("this dtype is not reduced");
}

// algorithms, of each call in turn: "one_shot" and "two_shot", or "scatter" with the operand as
// [rows, ranks, inner].
void reduce(const Run& run, const std::string& dtype, const std::string& reduction,
            const std::vector<std::string>& algorithms, int64_t rows) {
  const int n = run.ranks.num_ranks();
  std::vector<ReduceArgs> shapes;
  int64_t scratch_bytes = 0;
  for (const std::string& algorithm : algorithms) {
    const bool scatter = algorithm == "scatter";
    require(rows > 0 && run.result_bytes() % rows == 0 &&
            run.result_bytes() * (scatter ? n : 1) == run.operand_bytes());
    ReduceArgs shape{};
    shape.element = element_from(dtype);
    shape.reduction = reduction_from(reduction);
    if (scatter) {
      shape_scatter(shape, rows, run.result_bytes() / rows, n);
    } else {
      shape_psum(shape, algorithm_from(algorithm), run.operand_bytes(), n);
    }
    scratch_bytes = std::max(scratch_bytes, (n - 1) * scratch_slot(shape.rows * shape.inner));
    shapes.push_back(shape);
  }
  require(!shapes.empty());
  run.go(scratch_bytes, [&](Communicator& communicator, const Plan& plan, int call,
                            const VirtualRanks::Buffers& buffers) {
    ReduceArgs args = shapes[call % shapes.size()];
    args.source = buffers.source;
    args.result.address = buffers.result;
    args.scratch.address = buffers.scratch;
    args.channel = run.channel;
    args.num_blocks = plan.num_blocks;
    args.num_sms = buffers.num_sms;
    run_reduce(communicator, args, run.result_bytes(), scratch_bytes, plan, buffers.stream);
  });
}

int64_t padded(int64_t cols) { return (cols + 7) / 8 * 8; }

// All but the addresses of a product's operands, x and then w, with rows padded to 8 elements of 16
// bits; so is the result.
template <typename Operands>
Operands product_operands(const Run& run, int64_t m, int64_t k, int64_t p, const std::string& dtype,
                          bool transpose_w) {
  require(dtype == "bfloat16" || dtype == "float16");
  Operands in{};
  in.m = m;
  in.k = k;
  in.p = p;
  in.pitch_x = padded(k);
  in.pitch_w = padded(transpose_w ? k : p);
  in.pitch_y = padded(p);
  in.transpose_w = transpose_w;
  in.bfloat16 = dtype == "bfloat16";
  in.channel = run.channel;
  return in;
}

// The same of a product that is summed over ranks.
template <typename Operands>
Operands operands_of_sum(const Run& run, int64_t m, int64_t k, int64_t p, const std::string& dtype,
                         bool transpose_w, bool all_reduce) {
  auto in = product_operands<Operands>(run, m, k, p, dtype, transpose_w);
  in.all_reduce = all_reduce;
  const int64_t rows = all_reduce ? m : m / run.ranks.num_ranks();
  require(run.operand_bytes() == 2 * m * in.pitch_x + 2 * (transpose_w ? p : k) * in.pitch_w &&
          run.result_bytes() == 2 * rows * in.pitch_y);
  return in;
}

void matmul_reduce(const Run& run, int64_t m, int64_t k, int64_t p, const std::string& dtype,
                   bool transpose_w, bool all_reduce, int lead, int64_t outer) {
  auto shape = operands_of_sum<MatmulReduceOperands>(run, m, k, p, dtype, transpose_w, all_reduce);
  shape.outer = outer;
  const int64_t scratch_bytes = matmul_reduce_scratch(m, p, run.ranks.num_ranks(), all_reduce);
  run.ranks.load(load_matmul_reduce);
  run.go(scratch_bytes, [&](Communicator& communicator, const Plan& plan, int,
                            const VirtualRanks::Buffers& buffers) {
    MatmulReduceOperands in = shape;
    in.x = buffers.source;
    in.w = buffers.source + 2 * m * in.pitch_x;
    in.y.address = buffers.result;
    in.scratch.address = buffers.scratch;
    const int num_blocks = plan.num_blocks > 0 ? plan.num_blocks : buffers.num_sms;
    run_matmul_reduce(communicator, in, {num_blocks, lead}, run.result_bytes(), scratch_bytes,
                      buffers.stream);
  });
}

// The plan says the protocol.
void few_rows(const Run& run, int64_t m, int64_t k, int64_t p, const std::string& dtype,
              bool transpose_w, bool all_reduce, int split_tiles, int split) {
  const auto shape = operands_of_sum<FewRowsOperands>(run, m, k, p, dtype, transpose_w, all_reduce);
  const int64_t scratch_bytes = few_rows_scratch(m, p, run.ranks.num_ranks(), all_reduce, false);
  run.ranks.load(load_few_rows);
  run.go(scratch_bytes, [&](Communicator& communicator, const Plan& plan, int,
                            const VirtualRanks::Buffers& buffers) {
    FewRowsOperands in = shape;
    in.x = buffers.source;
    in.w = buffers.source + 2 * m * in.pitch_x;
    in.y = buffers.result;
    in.scratch.address = buffers.scratch;
    const bool low_latency = plan.protocol == Protocol::kLowLatency;
    run_few_rows(communicator, in, {low_latency, plan.num_blocks, split_tiles, split},
                 scratch_bytes, buffers.stream);
  });
}

// The operand ends with three int32 arrays of num_updates: input offsets, send sizes, output
// offsets.
void ragged_all_to_all(const Run& run, int64_t row_bytes, int num_updates, bool checks) {
  const int64_t index_bytes = num_updates * static_cast<int64_t>(sizeof(int32_t));
  const int64_t data_bytes = run.operand_bytes() - 3 * index_bytes;
  require(row_bytes > 0 && num_updates > 0 && data_bytes > 0 && data_bytes % row_bytes == 0 &&
          run.result_bytes() % row_bytes == 0);
  run.go(0, [&](Communicator& communicator, const Plan& plan, int,
                const VirtualRanks::Buffers& buffers) {
    RaggedArgs args{};
    args.source = buffers.source;
    args.result.address = buffers.result;
    args.input_offsets = buffers.source + data_bytes;
    args.send_sizes = buffers.source + data_bytes + index_bytes;
    args.output_offsets = buffers.source + data_bytes + 2 * index_bytes;
    args.num_updates = num_updates;
    args.row_bytes = row_bytes;
    args.source_rows = data_bytes / row_bytes;
    args.result_rows = run.result_bytes() / row_bytes;
    args.checks = checks;
    args.channel = run.channel;
    args.num_blocks = plan.num_blocks;
    args.num_sms = buffers.num_sms;
    run_ragged_all_to_all(communicator, args, run.result_bytes(), buffers.stream);
  });
}

// The operand is x [outer, m, k], then w; the result is the gathered x, then the product. Rows are
// padded to 8 elements.
void all_gather_matmul(const Run& run, int64_t m, int64_t k, int64_t p, const std::string& tile,
                       int num_comm_blocks, bool transpose_w, const std::string& dtype,
                       bool float32_result, bool own_rows, int64_t outer) {
  const int n = run.ranks.num_ranks();
  auto shape = product_operands<AllGatherMatmulOperands>(run, m, k, p, dtype, transpose_w);
  shape.outer = outer;
  shape.float32_result = float32_result;
  shape.own_rows = own_rows;
  const int64_t x_bytes = 2 * outer * m * shape.pitch_x;
  require(outer > 0 && m > 0 && k > 0 && p > 0 &&
          run.operand_bytes() == x_bytes + 2 * shape.pitch_w * (transpose_w ? p : k) &&
          run.result_bytes() ==
              n * (x_bytes + outer * m * shape.pitch_y * (float32_result ? 4 : 2)));
  const MatmulTile shape_of_tile = matmul_tile_from(tile);
  run.ranks.load(load_all_gather_matmul);
  run.go(0, [&](Communicator& communicator, const Plan& plan, int,
                const VirtualRanks::Buffers& buffers) {
    AllGatherMatmulOperands in = shape;
    in.x = buffers.source;
    in.w = buffers.source + x_bytes;
    in.gathered.address = buffers.result;
    in.y = buffers.result + n * x_bytes;
    const int blocks = plan.num_blocks > 0 ? plan.num_blocks : buffers.num_sms;
    run_all_gather_matmul(communicator, in, n * x_bytes, {shape_of_tile, blocks, num_comm_blocks},
                          buffers.stream);
  });
}

// A method with the arguments that all ops take, then its own.
template <typename... Own, typename... Names>
void method(nb::class_<VirtualRanks>& type, const char* name, void (*op)(const Run&, Own...),
            const char* text, Names... names) {
  type.def(
      name,
      [op](VirtualRanks& ranks, Operands operands, Results results, std::vector<PlanWords> plans,
           Own... own, int channel, int offset, std::vector<int> absent) {
        op({ranks, operands, results, std::move(plans), channel, offset, std::move(absent)},
           own...);
      },
      nb::arg("operands"), nb::arg("results"), nb::arg("plans"), names..., nb::arg("channel") = 0,
      nb::arg("offset") = 0, nb::arg("absent") = std::vector<int>{}, text);
}

}  // namespace

void bind_virtual_ranks(nb::module_& module) {
  nb::class_<VirtualRanks> type(
      module, "VirtualRanks",
      "Test harness: ranks as streams on the GPUs present. operands and results: bytes, [calls, "
      "ranks, bytes]; results are what the device buffers start with, then what they hold. plans: "
      "(mechanism, protocol, blocks a rank) of each call in turn.");
  type.def(nb::init<int, std::vector<int>, double>(), nb::arg("num_ranks"), nb::arg("devices"),
           nb::arg("timeout_s") = 20.0)
      .def_prop_ro("num_ranks", &VirtualRanks::num_ranks);
  method(type, "all_gather", &all_gather, "Operands seen as [rows, inner].", nb::arg("rows") = 1);
  method(type, "all_to_all", &all_to_all,
         "Parts seen as [batch, rows, inner]; split_first: the operand is [batch, ranks, rows, "
         "inner], else [batch, rows, ranks, inner].",
         nb::arg("batch"), nb::arg("rows"), nb::arg("split_first"));
  method(type, "ppermute", &ppermute, "destinations[source], -1 for none.",
         nb::arg("destinations"));
  method(type, "reduce", &reduce,
         "algorithms, of each call in turn: \"one_shot\" and \"two_shot\", or \"scatter\" with "
         "operands as [rows, ranks, inner].",
         nb::arg("dtype"), nb::arg("reduction"), nb::arg("algorithms"), nb::arg("rows") = 1);
  method(type, "matmul_reduce", &matmul_reduce,
         "Operands are x [m, k], then w [k, p] or [p, k], 16-bit rows padded to 8 elements.",
         nb::arg("m"), nb::arg("k"), nb::arg("p"), nb::arg("dtype") = "bfloat16",
         nb::arg("transpose_w") = false, nb::arg("all_reduce") = false, nb::arg("lead") = 1,
         nb::arg("outer") = 1);
  method(type, "few_rows", &few_rows, "The same of few rows.", nb::arg("m"), nb::arg("k"),
         nb::arg("p"), nb::arg("dtype") = "bfloat16", nb::arg("transpose_w") = false,
         nb::arg("all_reduce") = false, nb::arg("split_tiles") = 0, nb::arg("split") = 1);
  method(type, "ragged_all_to_all", &ragged_all_to_all,
         "Operands end with int32 input_offsets, send_sizes, output_offsets of num_updates each.",
         nb::arg("row_bytes"), nb::arg("num_updates"), nb::arg("checks") = false);
  method(type, "all_gather_matmul", &all_gather_matmul,
         "Operands are x [outer, m, k], then w [k, p], or [p, k] with transpose_w; results the "
         "gathered x, "
         "then the product. Rows are padded to 8 elements.",
         nb::arg("m"), nb::arg("k"), nb::arg("p"), nb::arg("tile"), nb::arg("num_comm_blocks"),
         nb::arg("transpose_w") = false, nb::arg("dtype") = "bfloat16",
         nb::arg("float32_result") = false, nb::arg("own_rows") = true, nb::arg("outer") = 1);
}

}  // namespace pk
