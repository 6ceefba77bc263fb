// all_gather_matmul for XLA: decode, check that buffers and attributes fit, launch. No maths.
#include <string_view>

#include "ffi/attributes.h"
#include "ffi/collectives.h"
#include "ffi/handler.h"
#include "ffi/launch.h"
#include "ffi/matrix.h"
#include "ffi/names.h"

namespace pk {
namespace {

namespace ffi = xla::ffi;

struct AllGatherMatmulSite : CallSite {
  int64_t outer, m, k, p;
  bool transpose_w, own_rows;
  AllGatherMatmulPlan tiling;
};

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(ffi::Dictionary attributes) {
  const auto decode = [&](AllGatherMatmulSite& site) {
    require_bulk_stores(site.plan);
    site.load = load_all_gather_matmul;
    site.outer = integer(attributes, "outer", 1, INT32_MAX);
    site.m = integer(attributes, "m", 1, INT32_MAX);
    site.k = integer(attributes, "k", 1, INT32_MAX);
    site.p = integer(attributes, "p", 1, INT32_MAX);
    site.transpose_w = attribute<bool>(attributes, "transpose_w");
    site.own_rows = attribute<bool>(attributes, "own_rows");
    site.tiling.tile = matmul_tile_from(attribute<std::string_view>(attributes, "tile"));
    site.tiling.num_blocks = site.plan.num_blocks;
    site.tiling.num_comm_blocks =
        static_cast<int>(integer(attributes, "num_comm_blocks", 0, kMaxBlocks));
  };
  return make_site<AllGatherMatmulSite>("all_gather_matmul", attributes, decode);
}

// x, w -> gathered, y; matrices, in which the dimensions `outer` and rows are one.
ffi::Error execute(CallSite* call_site, cudaStream_t stream, int32_t device,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return guarded("all_gather_matmul", [&] {
    const auto& site = static_cast<const AllGatherMatmulSite&>(*call_site);
    Communicator& communicator = site.communicator(device);
    const ffi::AnyBuffer x = operand(operands, 0), w = operand(operands, 1);
    const ffi::AnyBuffer gathered = result(results, 0), y = result(results, 1);
    const int64_t part_rows = site.outer * site.m;
    AllGatherMatmulOperands in{};
    in.outer = site.outer;
    in.m = site.m;
    in.k = site.k;
    in.p = site.p;
    in.pitch_x = pitch_of("x", x, part_rows, in.k);
    in.pitch_w = site.transpose_w ? pitch_of("w", w, in.p, in.k) : pitch_of("w", w, in.k, in.p);
    const int64_t rows = part_rows * site.num_ranks();  // of what x was found to have: no overflow
    in.pitch_y = pitch_of("the product", y, rows, in.p);
    if (pitch_of("the gathered matrix", gathered, rows, in.k) != in.pitch_x ||
        gathered.element_type() != x.element_type())
      throw Error("the gathered matrix must be like x, in all but its rows");
    in.bfloat16 = is_bfloat16(x, w, y);
    in.float32_result = y.element_type() == ffi::DataType::F32;
    in.x = x.untyped_data();
    in.w = w.untyped_data();
    in.y = y.untyped_data();
    in.gathered.address = static_cast<char*>(gathered.untyped_data());
    in.transpose_w = site.transpose_w;
    in.own_rows = site.own_rows;
    in.channel = site.channel;
    run_all_gather_matmul(communicator, in, gathered.size_bytes(), site.tiling, stream);
  });
}

}  // namespace

PK_DEFINE_INSTANTIATE(pk_all_gather_matmul_instantiate, instantiate);
PK_DEFINE_EXECUTE(pk_all_gather_matmul_execute, execute);

}  // namespace pk
