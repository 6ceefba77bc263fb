// rms_norm_gather for XLA: decode, publish, launch. No maths.
#include "rms_norm_gather.h"

#include "ffi/custom_op.h"

namespace {

namespace ffi = xla::ffi;

ffi::Error execute(pk::Call call, ffi::Dictionary attributes, ffi::AnyBuffer x,
                   ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> y) {
  return pk::guarded("rms_norm_gather", [&] {
    const ffi::DataType type = x.element_type();
    if (type != ffi::DataType::F32 && type != ffi::DataType::BF16)
      throw pk::Error("x must be float32 or bfloat16");
    const auto cols = static_cast<int64_t>(weight.element_count());
    const auto size = static_cast<int64_t>(x.element_count());
    if (weight.element_type() != type || y->element_type() != type || size % cols != 0 ||
        static_cast<int64_t>(y->element_count()) != size * call.comm.num_ranks) {
      throw pk::Error("x, weight and result do not fit");
    }
    RmsNormGatherArgs args{};
    args.x = x.untyped_data();
    args.weight = weight.untyped_data();
    args.y = call.publish(*y);
    args.rows = size / cols;
    args.cols = cols;
    args.eps = static_cast<float>(pk::attribute<double>(attributes, "eps"));
    args.op = call.op;
    args.channel = call.channel;
    const Element element = type == ffi::DataType::F32 ? Element::kFloat32 : Element::kBfloat16;
    pk::check(launch_rms_norm_gather(call.comm, args, element, call.num_sms, call.stream),
              "launch");
  });
}

// Command-buffer compatible: it launches, and nothing that it passes differs from call to call.
XLA_FFI_DEFINE_HANDLER(rms_norm_gather, execute,
                       ffi::Ffi::Bind()
                           .Ctx<pk::Call>()
                           .Attrs<ffi::Dictionary>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

PK_JAX_CUSTOM_OPS({"rms_norm_gather", rms_norm_gather, load_rms_norm_gather});
