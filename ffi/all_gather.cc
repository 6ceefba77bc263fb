// all_gather for XLA: decode, ask the communicator, launch. No maths.
#include "ffi/attributes.h"
#include "ffi/collectives.h"
#include "ffi/handler.h"
#include "ffi/launch.h"

namespace pk {
namespace {

namespace ffi = xla::ffi;

struct AllGatherSite : CallSite {
  int64_t rows;
};

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(ffi::Dictionary attributes) {
  return make_site<AllGatherSite>("all_gather", attributes, [&](AllGatherSite& site) {
    site.rows = integer(attributes, "outer", 1, INT64_MAX);
  });
}

ffi::Error execute(CallSite* call_site, cudaStream_t stream, int32_t device,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return guarded("all_gather", [&] {
    const auto& site = static_cast<const AllGatherSite&>(*call_site);
    Communicator& communicator = site.communicator(device);
    const ffi::AnyBuffer source = operand(operands, 0), target = result(results, 0);
    const auto bytes = static_cast<int64_t>(source.size_bytes());
    const auto result_bytes = static_cast<int64_t>(target.size_bytes());
    require(bytes > 0 && bytes % site.rows == 0 && result_bytes == bytes * site.num_ranks(), site,
            bytes, result_bytes);
    PushArgs args = push_args(site, communicator, source, target);
    args.rows = site.rows;
    args.inner = bytes / site.rows;
    run_all_gather(communicator, args, result_bytes, site.plan, stream);
  });
}

}  // namespace

PK_DEFINE_INSTANTIATE(pk_all_gather_instantiate, instantiate);
PK_DEFINE_EXECUTE(pk_all_gather_execute, execute);

}  // namespace pk
