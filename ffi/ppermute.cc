// ppermute for XLA.
#include <algorithm>

#include "ffi/attributes.h"
#include "ffi/collectives.h"
#include "ffi/handler.h"
#include "ffi/launch.h"

namespace pk {
namespace {

namespace ffi = xla::ffi;

struct PpermuteSite : CallSite {
  Destinations destinations;
};

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(ffi::Dictionary attributes) {
  return make_site<PpermuteSite>("ppermute", attributes, [&](PpermuteSite& site) {
    const auto to = attribute<ffi::Span<const int64_t>>(attributes, "destinations");
    const int num_ranks = site.num_ranks();
    if (static_cast<int>(to.size()) != num_ranks)
      throw Error("destinations must hold one rank for each of " + std::to_string(num_ranks));
    std::fill(std::begin(site.destinations.rank), std::end(site.destinations.rank), int8_t{-1});
    for (int source = 0; source < num_ranks; ++source) {
      const int64_t rank = to[source];
      if (rank < -1 || rank >= num_ranks ||
          (rank >= 0 && std::count(to.begin(), to.end(), rank) > 1))
        throw Error("destinations must be different ranks, or -1: got " + std::to_string(rank));
      site.destinations.rank[source] = static_cast<int8_t>(rank);
    }
  });
}

ffi::Error execute(CallSite* call_site, cudaStream_t stream, int32_t device,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return guarded("ppermute", [&] {
    const auto& site = static_cast<const PpermuteSite&>(*call_site);
    Communicator& communicator = site.communicator(device);
    const ffi::AnyBuffer source = operand(operands, 0), target = result(results, 0);
    const auto bytes = static_cast<int64_t>(source.size_bytes());
    require(bytes > 0 && target.size_bytes() == source.size_bytes(), site, bytes,
            target.size_bytes());
    PushArgs args = push_args(site, communicator, source, target);
    args.rows = 1;
    args.inner = bytes;
    run_ppermute(communicator, args, site.destinations, bytes, site.plan, stream);
  });
}

}  // namespace

PK_DEFINE_INSTANTIATE(pk_ppermute_instantiate, instantiate);
PK_DEFINE_EXECUTE(pk_ppermute_execute, execute);

}  // namespace pk
