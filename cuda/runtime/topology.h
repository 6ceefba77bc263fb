// What the GPUs of this process are and how they are linked; asked of the CUDA runtime once.
#pragma once

#include <string>
#include <vector>

namespace pk {

struct DeviceInfo {
  int ordinal;
  std::string name;
  std::string uuid;  // hexadecimal
  std::string pci;
  int major, minor;
  int num_sms;
  int copy_engines;
  size_t memory_bytes;
  bool vmm;  // virtual memory management with descriptor handles
};

struct Topology {
  int driver_version;   // as CUDA writes it: 13000
  int runtime_version;  // of the library
  std::vector<DeviceInfo> devices;
  std::vector<std::vector<bool>> peer_access;  // [from][to], true on the diagonal
  std::vector<std::vector<bool>> nvlink;       // peers with native atomics: NVLink, not PCIe

  // Throws Error when there is no driver or no GPU.
  static const Topology& get();
};

}  // namespace pk
