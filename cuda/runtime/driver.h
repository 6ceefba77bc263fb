// The few CUDA driver calls the runtime API lacks (virtual memory, mostly), looked up once.
//
// The library links neither libcuda (absent on machines without a driver, where the package must
// still import) nor a stub of it.
#pragma once

#include <cuda.h>

namespace pk {

struct Driver {
  decltype(&cuGetErrorString) get_error_string;
  decltype(&cuDeviceGetAttribute) device_get_attribute;
  decltype(&cuMemGetAllocationGranularity) mem_get_allocation_granularity;
  decltype(&cuMemCreate) mem_create;
  decltype(&cuMemRelease) mem_release;
  decltype(&cuMemAddressReserve) mem_address_reserve;
  decltype(&cuMemAddressFree) mem_address_free;
  decltype(&cuMemMap) mem_map;
  decltype(&cuMemUnmap) mem_unmap;
  decltype(&cuMemSetAccess) mem_set_access;
  decltype(&cuMemExportToShareableHandle) mem_export;
  decltype(&cuMemImportFromShareableHandle) mem_import;
  decltype(&cuMemRetainAllocationHandle) mem_retain_allocation_handle;
  decltype(&cuMemGetAddressRange) mem_get_address_range;

  // Throws Error when there is no driver, or one that is too old to know a call.
  static const Driver& get();
};

// Throws Error naming the call.
void check(CUresult status, const char* what);

}  // namespace pk
