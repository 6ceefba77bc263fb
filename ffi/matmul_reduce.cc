// matmul_reduce_scatter and matmul_all_reduce for XLA: decode, check that buffers and attributes
// fit, launch. No maths.
#include "kernels/matmul_reduce.h"

#include "ffi/attributes.h"
#include "ffi/collectives.h"
#include "ffi/handler.h"
#include "ffi/launch.h"
#include "ffi/matrix.h"

namespace pk {
namespace {

namespace ffi = xla::ffi;

struct MatmulReduceSite : CallSite {
  int64_t outer, m, k, p;
  bool transpose_w, all_reduce;
  int lead;
};

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(const char* op, bool all_reduce,
                                                    const ffi::Dictionary& attributes) {
  return make_site<MatmulReduceSite>(op, attributes, [&](MatmulReduceSite& site) {
    require_bulk_stores(site.plan);
    site.outer = integer(attributes, "outer", 1, INT32_MAX);
    site.m = integer(attributes, "m", 1, INT32_MAX);
    site.k = integer(attributes, "k", 1, INT32_MAX);
    site.p = integer(attributes, "p", 1, INT32_MAX);
    site.transpose_w = attribute<bool>(attributes, "transpose_w");
    site.lead = static_cast<int>(integer(attributes, "lead", 1, kMaxBlocks));
    site.all_reduce = all_reduce;
    site.load = load_matmul_reduce;
    if (site.num_ranks() > kMatmulReduceRanks)
      throw Error(std::to_string(site.num_ranks()) + " ranks; the most is " +
                  std::to_string(kMatmulReduceRanks));
    if (all_reduce ? site.outer != 1
                   : site.m % site.num_ranks() != 0 ||
                         !matmul_reduce_takes(site.outer, site.m, site.num_ranks()))
      throw Error(std::to_string(site.m) + " rows in " + std::to_string(site.outer) +
                  " matrices for " + std::to_string(site.num_ranks()) + " ranks");
  });
}

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate_scatter(ffi::Dictionary attributes) {
  return instantiate("matmul_reduce_scatter", false, attributes);
}

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate_all(ffi::Dictionary attributes) {
  return instantiate("matmul_all_reduce", true, attributes);
}

ffi::Error execute(CallSite* call_site, cudaStream_t stream, int32_t device,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return guarded(call_site->op, [&] {
    const auto& site = static_cast<const MatmulReduceSite&>(*call_site);
    Communicator& communicator = site.communicator(device);
    const ffi::AnyBuffer x = operand(operands, 0), w = operand(operands, 1);
    const ffi::AnyBuffer y = result(results, 0), scratch = result(results, 1);
    auto in = operands_of_sum<MatmulReduceOperands>(site, x, w, y);
    in.outer = site.outer;
    in.y.address = static_cast<char*>(y.untyped_data());
    in.scratch.address = static_cast<char*>(scratch.untyped_data());
    run_matmul_reduce(communicator, in, {site.plan.num_blocks, site.lead}, y.size_bytes(),
                      scratch.size_bytes(), stream);
  });
}

}  // namespace

PK_DEFINE_INSTANTIATE(pk_matmul_reduce_scatter_instantiate, instantiate_scatter);
PK_DEFINE_EXECUTE(pk_matmul_reduce_scatter_execute, execute);
PK_DEFINE_INSTANTIATE(pk_matmul_all_reduce_instantiate, instantiate_all);
PK_DEFINE_EXECUTE(pk_matmul_all_reduce_execute, execute);

}  // namespace pk
