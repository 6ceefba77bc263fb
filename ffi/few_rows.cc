// matmul_all_reduce and matmul_reduce_scatter of few rows for XLA: decode, check that buffers and
// attributes fit, launch. No maths.
#include "kernels/few_rows.h"

#include "ffi/attributes.h"
#include "ffi/collectives.h"
#include "ffi/handler.h"
#include "ffi/launch.h"
#include "ffi/matrix.h"

namespace pk {
namespace {

namespace ffi = xla::ffi;

struct FewRowsSite : CallSite {
  int64_t m, k, p;
  bool transpose_w, all_reduce;
  FewRowsPlan to_launch;
};

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(const char* op, bool all_reduce,
                                                    const ffi::Dictionary& attributes) {
  return make_site<FewRowsSite>(op, attributes, [&](FewRowsSite& site) {
    if (site.plan.mechanism != Mechanism::kRegister || site.plan.num_blocks < 1)
      throw Error("few rows go by mechanism register, and num_blocks");
    site.m = integer(attributes, "m", 1, kMostFewRows);
    site.k = integer(attributes, "k", 1, INT32_MAX);
    site.p = integer(attributes, "p", 1, INT32_MAX);
    site.transpose_w = attribute<bool>(attributes, "transpose_w");
    site.to_launch.low_latency = site.plan.protocol == Protocol::kLowLatency;
    site.to_launch.num_blocks = site.plan.num_blocks;
    site.to_launch.split_tiles =
        static_cast<int>(integer(attributes, "split_tiles", 0, kMaxBlocks));
    site.to_launch.split = static_cast<int>(integer(attributes, "split", 1, kMaxBlocks));
    site.all_reduce = all_reduce;
    site.load = load_few_rows;
    if (!all_reduce && site.m % site.num_ranks() != 0)
      throw Error(std::to_string(site.m) + " rows for " + std::to_string(site.num_ranks()) +
                  " ranks");
    const int64_t most =
        few_rows_most_cols(site.m, site.num_ranks(), all_reduce, site.to_launch.low_latency);
    if (site.p > most)
      throw Error(std::to_string(site.p) + " columns of " + std::to_string(site.m) + " rows; for " +
                  std::to_string(site.num_ranks()) + " ranks the most is " + std::to_string(most));
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
    const auto& site = static_cast<const FewRowsSite&>(*call_site);
    Communicator& communicator = site.communicator(device);
    const ffi::AnyBuffer x = operand(operands, 0), w = operand(operands, 1);
    const ffi::AnyBuffer y = result(results, 0);
    auto in = operands_of_sum<FewRowsOperands>(site, x, w, y);
    in.y = y.untyped_data();
    size_t scratch_bytes = 0;
    if (!site.to_launch.low_latency) {
      const ffi::AnyBuffer scratch = result(results, 1);
      in.scratch.address = static_cast<char*>(scratch.untyped_data());
      scratch_bytes = scratch.size_bytes();
    }
    run_few_rows(communicator, in, site.to_launch, scratch_bytes, stream);
  });
}

}  // namespace

PK_DEFINE_INSTANTIATE(pk_few_rows_reduce_scatter_instantiate, instantiate_scatter);
PK_DEFINE_INSTANTIATE(pk_few_rows_all_reduce_instantiate, instantiate_all);
PK_DEFINE_EXECUTE(pk_few_rows_execute, execute);

}  // namespace pk
