// psum (pmax and pmin with it) and psum_scatter for XLA.
#include "ffi/attributes.h"
#include "ffi/collectives.h"
#include "ffi/handler.h"
#include "ffi/launch.h"

namespace pk {
namespace {

namespace ffi = xla::ffi;

struct ReduceSite : CallSite {
  Reduction reduction;
  Algorithm algorithm;
  int64_t rows;
};

// Complex sums go by their parts. Booleans are bytes of 0 and 1, whose order is theirs.
Element element_from(ffi::DataType type, Reduction reduction) {
  const bool sum = reduction == Reduction::kSum;
  switch (type) {
    case ffi::F32:
      return Element::kF32;
    case ffi::F64:
      return Element::kF64;
    case ffi::BF16:
      return Element::kBF16;
    case ffi::F16:
      return Element::kF16;
    case ffi::S8:
      return Element::kS8;
    case ffi::S16:
      return Element::kS16;
    case ffi::S32:
      return Element::kS32;
    case ffi::S64:
      return Element::kS64;
    case ffi::U8:
      return Element::kU8;
    case ffi::U16:
      return Element::kU16;
    case ffi::U32:
      return Element::kU32;
    case ffi::U64:
      return Element::kU64;
    case ffi::PRED:
      if (!sum) return Element::kU8;
      break;
    case ffi::C64:
      if (sum) return Element::kF32;
      break;
    case ffi::C128:
      if (sum) return Element::kF64;
      break;
    default:
      break;
  }
  throw Error("elements of XLA type " + std::to_string(static_cast<int>(type)) +
              " are not reduced here");
}

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate_psum(ffi::Dictionary attributes) {
  return make_site<ReduceSite>("psum", attributes, [&](ReduceSite& site) {
    site.reduction = reduction_from(attribute<std::string_view>(attributes, "reduction"));
    site.algorithm = algorithm_from(attribute<std::string_view>(attributes, "algorithm"));
    site.rows = 1;
  });
}

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate_psum_scatter(ffi::Dictionary attributes) {
  return make_site<ReduceSite>("psum_scatter", attributes, [&](ReduceSite& site) {
    site.reduction = reduction_from(attribute<std::string_view>(attributes, "reduction"));
    site.algorithm = Algorithm::kScatter;
    site.rows = integer(attributes, "outer", 1, INT64_MAX);
  });
}

ffi::Error execute(CallSite* call_site, cudaStream_t stream, int32_t device,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return guarded(call_site->op, [&] {
    const auto& site = static_cast<const ReduceSite&>(*call_site);
    Communicator& communicator = site.communicator(device);
    const int num_ranks = site.num_ranks();
    const bool scatter = site.algorithm == Algorithm::kScatter;
    const ffi::AnyBuffer source = operand(operands, 0), target = result(results, 0);
    const auto bytes = static_cast<int64_t>(source.size_bytes());
    const auto result_bytes = static_cast<int64_t>(target.size_bytes());
    require(bytes > 0 && result_bytes * (scatter ? num_ranks : 1) == bytes &&
                result_bytes % site.rows == 0,
            site, bytes, result_bytes);
    ReduceArgs args{};
    args.reduction = site.reduction;
    args.element = element_from(source.element_type(), site.reduction);
    args.source = static_cast<const char*>(source.untyped_data());
    args.result.address = static_cast<char*>(target.untyped_data());
    size_t scratch_bytes = 0;
    if (site.plan.protocol == Protocol::kSimple) {
      const ffi::AnyBuffer scratch = result(results, 1);
      args.scratch.address = static_cast<char*>(scratch.untyped_data());
      scratch_bytes = scratch.size_bytes();
    }
    args.channel = site.channel;
    args.num_blocks = site.plan.num_blocks;
    args.num_sms = communicator.num_sms();
    if (scatter) {
      shape_scatter(args, site.rows, result_bytes / site.rows, num_ranks);
    } else {
      shape_psum(args, site.algorithm, bytes, num_ranks);
    }
    run_reduce(communicator, args, result_bytes, scratch_bytes, site.plan, stream);
  });
}

}  // namespace

PK_DEFINE_INSTANTIATE(pk_psum_instantiate, instantiate_psum);
PK_DEFINE_EXECUTE(pk_psum_execute, execute);
PK_DEFINE_INSTANTIATE(pk_psum_scatter_instantiate, instantiate_psum_scatter);
PK_DEFINE_EXECUTE(pk_psum_scatter_execute, execute);

}  // namespace pk
