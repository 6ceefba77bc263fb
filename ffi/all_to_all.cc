// all_to_all for XLA.
#include "ffi/attributes.h"
#include "ffi/collectives.h"
#include "ffi/handler.h"
#include "ffi/launch.h"

namespace pk {
namespace {

namespace ffi = xla::ffi;

struct AllToAllSite : CallSite {
  int64_t batch;
  int64_t rows;
  bool split_first;
};

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(ffi::Dictionary attributes) {
  return make_site<AllToAllSite>("all_to_all", attributes, [&](AllToAllSite& site) {
    site.batch = integer(attributes, "batch", 1, INT64_MAX);
    site.rows = integer(attributes, "rows", 1, INT64_MAX / site.batch);
    site.split_first = integer(attributes, "split_first", 0, 1) != 0;
  });
}

ffi::Error execute(CallSite* call_site, cudaStream_t stream, int32_t device,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return guarded("all_to_all", [&] {
    const auto& site = static_cast<const AllToAllSite&>(*call_site);
    Communicator& communicator = site.communicator(device);
    const ffi::AnyBuffer source = operand(operands, 0), target = result(results, 0);
    const auto bytes = static_cast<int64_t>(source.size_bytes());
    const int64_t rows = site.batch * site.rows;
    require(bytes > 0 && bytes % site.num_ranks() == 0 && bytes / site.num_ranks() % rows == 0 &&
                target.size_bytes() == source.size_bytes(),
            site, bytes, target.size_bytes());
    PushArgs args = push_args(site, communicator, source, target);
    args.rows = rows;
    args.inner = bytes / site.num_ranks() / rows;
    run_all_to_all(communicator, args, site.batch, site.split_first, bytes, site.plan, stream);
  });
}

}  // namespace

PK_DEFINE_INSTANTIATE(pk_all_to_all_instantiate, instantiate);
PK_DEFINE_EXECUTE(pk_all_to_all_execute, execute);

}  // namespace pk
