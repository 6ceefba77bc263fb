// ragged_all_to_all for XLA. The result is the buffer of the operand `output`.
#include "ffi/attributes.h"
#include "ffi/collectives.h"
#include "ffi/handler.h"
#include "ffi/launch.h"

namespace pk {
namespace {

namespace ffi = xla::ffi;

struct RaggedSite : CallSite {
  int64_t row_bytes;
  bool checks;
};

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(ffi::Dictionary attributes) {
  return make_site<RaggedSite>("ragged_all_to_all", attributes, [&](RaggedSite& site) {
    site.row_bytes = integer(attributes, "row_bytes", 1, INT64_MAX);
    site.checks = integer(attributes, "checks", 0, 1) != 0;
    if (site.plan.mechanism != Mechanism::kRegister || site.plan.protocol != Protocol::kSimple)
      throw Error("slices go by registers and the simple protocol only");
  });
}

ffi::Error execute(CallSite* call_site, cudaStream_t stream, int32_t device,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return guarded("ragged_all_to_all", [&] {
    const auto& site = static_cast<const RaggedSite&>(*call_site);
    Communicator& communicator = site.communicator(device);
    const ffi::AnyBuffer source = operand(operands, 0), target = result(results, 0);
    const auto bytes = static_cast<int64_t>(source.size_bytes());
    const auto result_bytes = static_cast<int64_t>(target.size_bytes());
    require(result_bytes > 0 && bytes % site.row_bytes == 0 && result_bytes % site.row_bytes == 0,
            site, bytes, result_bytes);
    const ffi::DataType type = operand(operands, 2).element_type();
    const auto num_updates = static_cast<int64_t>(operand(operands, 2).element_count());
    for (size_t i = 2; i < 6; ++i) {
      const ffi::AnyBuffer indices = operand(operands, i);
      if (indices.element_type() != type || (type != ffi::S32 && type != ffi::S64) ||
          static_cast<int64_t>(indices.element_count()) != num_updates) {
        throw Error("offsets and sizes must be int32 or int64, all of one length");
      }
    }
    if (operand(operands, 1).untyped_data() != target.untyped_data())
      throw Error("the result must be the buffer of the operand `output`");
    RaggedArgs args{};
    args.source = static_cast<const char*>(source.untyped_data());
    args.result.address = static_cast<char*>(target.untyped_data());
    args.input_offsets = operand(operands, 2).untyped_data();
    args.send_sizes = operand(operands, 3).untyped_data();
    args.output_offsets = operand(operands, 4).untyped_data();
    args.wide_indices = type == ffi::S64;
    args.num_updates = static_cast<int>(num_updates);
    args.row_bytes = site.row_bytes;
    args.source_rows = bytes / site.row_bytes;
    args.result_rows = result_bytes / site.row_bytes;
    args.checks = site.checks;
    args.channel = site.channel;
    args.num_blocks = site.plan.num_blocks;
    args.num_sms = communicator.num_sms();
    run_ragged_all_to_all(communicator, args, result_bytes, stream);
  });
}

}  // namespace

PK_DEFINE_INSTANTIATE(pk_ragged_all_to_all_instantiate, instantiate);
PK_DEFINE_EXECUTE(pk_ragged_all_to_all_execute, execute);

}  // namespace pk
