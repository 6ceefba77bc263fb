#include "ffi/custom_op_loader.h"

#include <dlfcn.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string_view>

#include "ffi/custom_op.h"
#include "ffi/handler.h"
#include "runtime/error_log.h"

namespace pk {
namespace {

namespace ffi = xla::ffi;

struct LoadedOp {
  const CustomOp* op;
  Op number;
  std::string path;
};

// Never destroyed, like the libraries, whose handlers XLA keeps.
struct Loaded {
  std::shared_mutex mutex;
  std::map<std::string, LoadedOp, std::less<>> ops;
};
Loaded& loaded() {
  static Loaded& loaded = *new Loaded;
  return loaded;
}

struct CustomOpSite : CallSite {
  Op number;
};

// Runs body for a caller that may not see an exception.
template <typename Body>
const char* problem_of(Body body) {
  thread_local std::string text;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
}

template <typename T>
auto get(const ffi::Context& context) {
  auto value = context.get<T>();
  if (!value.has_value()) throw Error(value.error().message());
  return *value;
}

const char* begin(const XLA_FFI_Api* api, XLA_FFI_InvokeContext* invocation, Call* call) {
  return problem_of([&] {
    const ffi::Context context(api, invocation);
    const auto& site = static_cast<const CustomOpSite&>(*get<ffi::State<CallSite>>(context));
    Communicator& communicator = site.communicator(get<ffi::DeviceOrdinal>(context));
    *call = {communicator.view(),
             site.number,
             site.channel,
             communicator.num_sms(),
             get<ffi::PlatformStream<cudaStream_t>>(context),
             &communicator};
    communicator.count_launch();
  });
}

const char* publish(const void* communicator, const void* pointer, size_t bytes, uint64_t* offset) {
  return problem_of([&] {
    // Peers use vectors that their own addresses allow, so ours must allow them.
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0)
      throw Error("a published buffer is not 16-byte aligned, as XLA's buffers are");
    *offset = static_cast<const Communicator*>(communicator)->publish(pointer, bytes);
  });
}

constexpr CallFunctions kCallFunctions{begin, publish};

const CustomOps& open(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw Error(dlerror());
  const auto* found = static_cast<const CustomOps*>(dlsym(library, "pk_jax_custom_ops"));
  if (!found) throw Error(path + " holds no ops: PK_JAX_CUSTOM_OPS(...) is missing in its sources");
  const std::string remedy =
      "; build it again with the headers of pk_jax.get_include() (pk_jax " PK_JAX_VERSION ")";
  if (found->version != kCustomOpVersion) {
    throw Error(path + " was built for version " + std::to_string(found->version) +
                " of pk_jax's interface for custom ops, and this is version " +
                std::to_string(kCustomOpVersion) + remedy);
  }
  if (found->layout != kCustomOpLayout)
    throw Error(path + " was built with headers of another pk_jax" + remedy);
  return *found;
}

}  // namespace

std::vector<std::string> load_custom_ops(const std::string& path,
                                         const std::set<std::string>& taken) {
  const CustomOps& library = open(path);
  std::unique_lock lock(loaded().mutex);
  std::vector<std::string> added;
  for (const CustomOp* op = library.ops; op != library.ops + library.num_ops; ++op) {
    const auto known = loaded().ops.find(op->name);
    if (known != loaded().ops.end() && known->second.op == op) continue;
    if (known != loaded().ops.end()) {
      throw Error(path + ": op " + op->name + " is here already, from " + known->second.path +
                  "; a library that was built again is seen by a new process");
    }
    if (taken.contains(op->name))
      throw Error(path + ": " + op->name + " is the name of an op of pk_jax; choose another");
    if (std::find(added.begin(), added.end(), op->name) != added.end())
      throw Error(path + ": op " + op->name + " is twice in its PK_JAX_CUSTOM_OPS(...)");
    added.push_back(op->name);
  }
  *library.functions = &kCallFunctions;
  for (const CustomOp* op = library.ops; op != library.ops + library.num_ops; ++op) {
    if (!loaded().ops.contains(op->name)) loaded().ops[op->name] = {op, number_op(op->name), path};
  }
  return added;
}

std::map<std::string, XLA_FFI_Handler*> custom_ops() {
  std::shared_lock lock(loaded().mutex);
  std::map<std::string, XLA_FFI_Handler*> all;
  for (const auto& [name, op] : loaded().ops) all[name] = op.op->execute;
  return all;
}

namespace {

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(ffi::Dictionary attributes) {
  std::shared_lock lock(loaded().mutex);
  const auto name = attributes.get<std::string_view>("custom_op");
  const auto found = name.has_value() ? loaded().ops.find(*name) : loaded().ops.end();
  if (found == loaded().ops.end())
    return ffi::Unexpected(ffi::Error::Internal("pk_jax: a call names no op that was loaded"));
  return make_site<CustomOpSite>(found->first.c_str(), attributes, [&](CustomOpSite& site) {
    site.load = found->second.op->load;
    site.number = found->second.number;
  });
}

}  // namespace

PK_DEFINE_INSTANTIATE(pk_custom_op_instantiate, instantiate);

}  // namespace pk
