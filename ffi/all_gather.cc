// all_gather for XLA: decode, ask the communicator, launch. No maths.
#include "ffi/all_gather.h"

#include <cuda_runtime_api.h>

#include <string>
#include <string_view>

#include "ffi/call_site.h"
#include "ffi/launch.h"
#include "ffi/names.h"
#include "ffi/status.h"
#include "runtime/check.h"

namespace pk {
namespace {

namespace ffi = xla::ffi;

struct AllGatherSite : CallSite {
  int64_t rows;
  Mechanism mechanism;
  Protocol protocol;
  int num_blocks;

  static ffi::TypeId id;
};
ffi::TypeId AllGatherSite::id = {};

ffi::ErrorOr<std::unique_ptr<AllGatherSite>> instantiate(ffi::Span<const int64_t> groups,
                                                         ffi::Span<const int64_t> devices,
                                                         int64_t group_size, int64_t channel,
                                                         int64_t outer, std::string_view mechanism,
                                                         std::string_view protocol,
                                                         int64_t num_blocks) {
  auto site = std::make_unique<AllGatherSite>();
  ffi::Error failed = guarded("all_gather", [&] {
    site->op = "all_gather";
    site->groups = Groups::intern(groups, devices, group_size);
    if (channel < 0 || channel >= kNumChannels)
      throw Error("channel " + std::to_string(channel) + " is out of range");
    if (outer < 1) throw Error("outer must be at least 1, not " + std::to_string(outer));
    if (num_blocks < 0 || num_blocks > kMaxBlocks)
      throw Error("num_blocks " + std::to_string(num_blocks) + " is out of range");
    site->channel = static_cast<int>(channel);
    site->rows = outer;
    site->mechanism = mechanism_from(mechanism);
    site->protocol = protocol_from(protocol);
    site->num_blocks = static_cast<int>(num_blocks);
    site->needs_landing = site->mechanism == Mechanism::kCopyEngine;
  });
  if (failed.failure()) return ffi::Unexpected(failed);
  return site;
}

ffi::Error prepare_site(AllGatherSite* site, ffi::RunId run, int32_t device, ffi::Context context) {
  return prepare(*site, run, device, context);
}

ffi::Error initialize_site(AllGatherSite* site, cudaStream_t stream, int32_t device,
                           ffi::Context context, ffi::RemainingRets results) {
  return initialize(*site, stream, device, context, [&] {
    auto result = results.get<ffi::AnyBuffer>(0);
    if (!result.has_value())
      throw Error("Initialize got no result buffer: " + result.error().message());
    return (*result)->untyped_data();
  });
}

ffi::Error execute(AllGatherSite* site, cudaStream_t stream, int32_t device, ffi::AnyBuffer operand,
                   ffi::Result<ffi::AnyBuffer> result) {
  return guarded("all_gather", [&] {
    Communicator& communicator = site->communicator(device);
    const int64_t bytes = static_cast<int64_t>(operand.size_bytes());
    if (bytes == 0 || bytes % site->rows != 0 ||
        static_cast<int64_t>(result->size_bytes()) != bytes * communicator.num_ranks()) {
      throw Error("operand of " + std::to_string(bytes) + " bytes, result of " +
                  std::to_string(result->size_bytes()) + " bytes, " + std::to_string(site->rows) +
                  " rows and " + std::to_string(communicator.num_ranks()) + " ranks do not fit");
    }
    AllGatherArgs args{};
    args.source = static_cast<const char*>(operand.untyped_data());
    args.result = static_cast<char*>(result->untyped_data());
    args.rows = site->rows;
    args.inner = bytes / site->rows;
    args.channel = site->channel;
    args.num_blocks = site->num_blocks;
    args.num_sms = communicator.num_sms();
    // Peers store into the result with vectors that their own addresses allow.
    if (reinterpret_cast<uintptr_t>(args.result) % 16 != 0) {
      throw Error("the result is not 16-byte aligned, as XLA's buffers are");
    }
    run_all_gather(communicator, args, result->size_bytes(), site->mechanism, site->protocol,
                   stream);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(pk_all_gather_instantiate, instantiate,
                              ffi::Ffi::BindInstantiate()
                                  .Attr<ffi::Span<const int64_t>>("groups")
                                  .Attr<ffi::Span<const int64_t>>("devices")
                                  .Attr<int64_t>("group_size")
                                  .Attr<int64_t>("channel")
                                  .Attr<int64_t>("outer")
                                  .Attr<std::string_view>("mechanism")
                                  .Attr<std::string_view>("protocol")
                                  .Attr<int64_t>("num_blocks"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(pk_all_gather_prepare, prepare_site,
                              ffi::Ffi::BindPrepare()
                                  .Ctx<ffi::State<AllGatherSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::Context>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(pk_all_gather_initialize, initialize_site,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::State<AllGatherSite>>()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::Context>()
                                  .RemainingRets());

// Command-buffer compatible: launches and async copies only, and nothing that differs from call to
// call (epochs live on the device).
XLA_FFI_DEFINE_HANDLER_SYMBOL(pk_all_gather_execute, execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<AllGatherSite>>()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_TypeId* all_gather_site_type_id() { return &AllGatherSite::id; }

const XLA_FFI_TypeInfo* all_gather_site_type_info() {
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<AllGatherSite>();
  return &info;
}

}  // namespace pk
