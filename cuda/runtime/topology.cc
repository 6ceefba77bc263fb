#include "runtime/topology.h"

#include <cuda_runtime_api.h>

#include <cstdio>

#include "runtime/check.h"
#include "runtime/driver.h"

namespace pk {
namespace {

DeviceInfo describe(int ordinal) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  DeviceInfo info{};
  info.ordinal = ordinal;
  info.name = properties.name;
  char text[3] = {};
  for (char byte : properties.uuid.bytes) {
    std::snprintf(text, sizeof text, "%02x", static_cast<unsigned char>(byte));
    info.uuid += text;
  }
  char pci[32] = {};
  check(cudaDeviceGetPCIBusId(pci, sizeof pci, ordinal), "cudaDeviceGetPCIBusId");
  info.pci = pci;
  info.major = properties.major;
  info.minor = properties.minor;
  info.num_sms = properties.multiProcessorCount;
  info.copy_engines = properties.asyncEngineCount;
  info.memory_bytes = properties.totalGlobalMem;
  int vmm = 0;
  check(Driver::get().device_get_attribute(
            &vmm, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, ordinal),
        "cuDeviceGetAttribute");
  info.vmm = vmm != 0;
  return info;
}

Topology query() {
  Topology topology{};
  check(cudaDriverGetVersion(&topology.driver_version), "cudaDriverGetVersion");
  if (topology.driver_version == 0) throw Error("no CUDA driver on this machine");
  check(cudaRuntimeGetVersion(&topology.runtime_version), "cudaRuntimeGetVersion");
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  for (int d = 0; d < count; ++d) topology.devices.push_back(describe(d));
  topology.peer_access.assign(count, std::vector<bool>(count, true));
  topology.nvlink = topology.peer_access;
  for (int from = 0; from < count; ++from) {
    for (int to = 0; to < count; ++to) {
      if (from == to) continue;
      int access = 0, atomics = 0;
      check(cudaDeviceCanAccessPeer(&access, from, to), "cudaDeviceCanAccessPeer");
      check(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, from, to),
            "cudaDeviceGetP2PAttribute");
      topology.peer_access[from][to] = access != 0;
      topology.nvlink[from][to] = access != 0 && atomics != 0;
    }
  }
  return topology;
}

}  // namespace

const Topology& Topology::get() {
  static const Topology topology =
      query();  // a failed query throws and is tried again at the next call
  return topology;
}

}  // namespace pk
