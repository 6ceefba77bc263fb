#include "runtime/driver.h"

#include <cuda_runtime_api.h>

#include <string>

#include "runtime/check.h"

namespace pk {
namespace {

template <typename Function>
void look_up(const char* name, Function& function) {
  void* pointer = nullptr;
  cudaDriverEntryPointQueryResult found;
  // 12000: the first driver whose signatures these are.
  check(cudaGetDriverEntryPointByVersion(name, &pointer, 12000, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess)
    throw Error(std::string("the CUDA driver has no ") + name);
  function = reinterpret_cast<Function>(pointer);
}

Driver load() {
  Driver driver{};
  look_up("cuGetErrorString", driver.get_error_string);
  look_up("cuDeviceGetAttribute", driver.device_get_attribute);
  look_up("cuMemGetAllocationGranularity", driver.mem_get_allocation_granularity);
  look_up("cuMemCreate", driver.mem_create);
  look_up("cuMemRelease", driver.mem_release);
  look_up("cuMemAddressReserve", driver.mem_address_reserve);
  look_up("cuMemAddressFree", driver.mem_address_free);
  look_up("cuMemMap", driver.mem_map);
  look_up("cuMemUnmap", driver.mem_unmap);
  look_up("cuMemSetAccess", driver.mem_set_access);
  look_up("cuMemExportToShareableHandle", driver.mem_export);
  look_up("cuMemImportFromShareableHandle", driver.mem_import);
  look_up("cuMemRetainAllocationHandle", driver.mem_retain_allocation_handle);
  look_up("cuMemGetAddressRange", driver.mem_get_address_range);
  return driver;
}

}  // namespace

const Driver& Driver::get() {
  static const Driver driver = load();
  return driver;
}

void check(CUresult status, const char* what) {
  if (status == CUDA_SUCCESS) return;
  const char* text = nullptr;
  Driver::get().get_error_string(status, &text);
  throw Error(std::string(what) + ": CUDA driver error " + std::to_string(status) +
              (text ? std::string(": ") + text : ""));
}

}  // namespace pk
