#include "runtime/symmetric_region.h"

#include <algorithm>
#include <string>
#include <utility>

#include "runtime/check.h"
#include "runtime/driver.h"

namespace pk {
namespace {

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

CUmemGenericAllocationHandle import(const Descriptor& descriptor) {
  CUmemGenericAllocationHandle memory;
  check(Driver::get().mem_import(&memory,
                                 reinterpret_cast<void*>(static_cast<intptr_t>(descriptor.get())),
                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "cuMemImportFromShareableHandle");
  return memory;
}

// `what` names the memory for the error.
Descriptor export_and_release(CUmemGenericAllocationHandle memory, const char* what) {
  int fd = -1;
  const CUresult exported =
      Driver::get().mem_export(&fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  Driver::get().mem_release(memory);
  check(exported, what);
  return Descriptor(fd);
}

bool same_process(const Placement& a, const Placement& b) { return a.process == b.process; }

bool one_process(const std::vector<Placement>& placements) {
  return std::all_of(placements.begin(), placements.end(),
                     [&](const Placement& p) { return same_process(p, placements[0]); });
}

}  // namespace

AddressRange::AddressRange(size_t bytes) : bytes_(bytes) {
  check(Driver::get().mem_address_reserve(&base_, bytes, 0, 0, 0), "cuMemAddressReserve");
}

AddressRange::AddressRange(AddressRange&& other) noexcept { *this = std::move(other); }

AddressRange& AddressRange::operator=(AddressRange&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  std::swap(pieces_, other.pieces_);
  return *this;
}

AddressRange::~AddressRange() {
  if (base_ == 0) return;
  const Driver& driver = Driver::get();
  for (const Piece& piece : pieces_) driver.mem_unmap(base_ + piece.offset, piece.bytes);
  driver.mem_address_free(base_, bytes_);
}

void AddressRange::map(CUmemGenericAllocationHandle memory, size_t offset, size_t bytes,
                       const std::vector<int>& devices) {
  const Driver& driver = Driver::get();
  const CUresult mapped = driver.mem_map(base_ + offset, bytes, 0, memory, 0);
  driver.mem_release(memory);  // the mapping keeps the memory alive
  check(mapped, "cuMemMap");
  pieces_.push_back({offset, bytes});
  std::vector<CUmemAccessDesc> access(devices.size());
  for (size_t i = 0; i < devices.size(); ++i) {
    access[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[i].location.id = devices[i];
    access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  check(driver.mem_set_access(base_ + offset, bytes, access.data(), access.size()),
        "cuMemSetAccess");
}

void AddressRange::unmap(size_t offset) {
  const auto piece = std::find_if(pieces_.begin(), pieces_.end(),
                                  [&](const Piece& p) { return p.offset == offset; });
  if (piece == pieces_.end()) return;
  Driver::get().mem_unmap(base_ + offset, piece->bytes);
  pieces_.erase(piece);
}

SymmetricRegion::SymmetricRegion(Exchange& exchange, const std::vector<Placement>& placements,
                                 size_t most)
    : placements_(placements),
      rank_(exchange.rank()),
      imported_(placements.size()),
      base_(placements.size()) {
  exchange.together("reserving addresses", [&] {
    const CUmemAllocationProp own = properties(placements[rank_].device);
    check(Driver::get().mem_get_allocation_granularity(&granularity_, &own,
                                                       CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
          "cuMemGetAllocationGranularity");
    most_ = (most + granularity_ - 1) / granularity_ * granularity_;
    own_ = AddressRange(most_);
    for (size_t peer = 0; peer < placements.size(); ++peer) {
      if (!same_process(placements[peer], placements[rank_])) {
        imported_[peer] = AddressRange(most_);
      } else if (std::find(local_devices_.begin(), local_devices_.end(), placements[peer].device) ==
                 local_devices_.end()) {
        local_devices_.push_back(placements[peer].device);
      }
    }
  });
  // Ranks of one process share one address space: the owner's mapping serves them all.
  const std::vector<char*> addresses = exchange.all_gather(own_.base());
  for (size_t peer = 0; peer < placements.size(); ++peer) {
    base_[peer] = imported_[peer].base() ? imported_[peer].base() : addresses[peer];
  }
}

void SymmetricRegion::grow(Exchange& exchange, size_t bytes, cudaStream_t stream) {
  const size_t target = (bytes + granularity_ - 1) / granularity_ * granularity_;
  if (target <= bytes_) return;
  try {
    back(exchange, target, stream);
  } catch (const Lost&) {
    throw;  // another rank may have gone on and use what this one has mapped
  } catch (...) {
    // It failed on all ranks (Exchange::together): leave the region as it was, fit to be tried
    // again.
    own_.unmap(bytes_);
    for (AddressRange& range : imported_) range.unmap(bytes_);
    throw;
  }
  bytes_ = target;
}

void SymmetricRegion::back(Exchange& exchange, size_t target, cudaStream_t stream) {
  const size_t added = target - bytes_;
  const bool remote = !one_process(placements_);
  Descriptor shared;
  exchange.together("growing a workspace", [&] {
    if (target > most_) {
      throw Error("a symmetric region cannot grow to " + std::to_string(target) + " bytes");
    }
    const CUmemAllocationProp own = properties(placements_[rank_].device);
    const std::string create =
        "cuMemCreate of " + std::to_string(added) +
        " bytes outside XLA's heap (lower XLA_PYTHON_CLIENT_MEM_FRACTION to leave room)";
    CUmemGenericAllocationHandle memory;
    check(Driver::get().mem_create(&memory, added, &own, 0), create.c_str());
    own_.map(memory, bytes_, added, local_devices_);
    if (remote) {
      CUmemGenericAllocationHandle again;
      check(Driver::get().mem_retain_allocation_handle(&again, own_.base() + bytes_),
            "cuMemRetainAllocationHandle");
      shared = export_and_release(again, "cuMemExportToShareableHandle");
    }
    check(cudaMemsetAsync(own_.base() + bytes_, 0, added, stream), "cudaMemsetAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  });
  // Nobody writes to a piece before its owner has cleared it (above) and everybody has mapped it
  // (below).
  if (!remote) return;
  const std::vector<Descriptor> received = exchange_descriptors(exchange, placements_, shared);
  exchange.together("mapping a workspace", [&] {
    for (size_t peer = 0; peer < received.size(); ++peer) {
      if (!received[peer]) continue;
      imported_[peer].map(import(received[peer]), bytes_, added, {placements_[rank_].device});
    }
  });
}

PeerHeaps::PeerHeaps(Exchange& exchange, const std::vector<Placement>& placements,
                     const void* pointer)
    : imported_(placements.size()), base_(placements.size(), nullptr) {
  if (one_process(placements)) return;  // plain pointers do
  const Driver& driver = Driver::get();
  const int rank = exchange.rank();
  Descriptor shared;
  exchange.together("exporting XLA's heap", [&] {
    check(driver.mem_get_address_range(&own_base_, &own_bytes_,
                                       reinterpret_cast<CUdeviceptr>(pointer)),
          "cuMemGetAddressRange of an XLA buffer");
    CUmemGenericAllocationHandle memory;
    check(driver.mem_retain_allocation_handle(&memory, reinterpret_cast<void*>(own_base_)),
          "cuMemRetainAllocationHandle of XLA's heap (use XLA's default allocator)");
    shared = export_and_release(memory, "cuMemExportToShareableHandle of XLA's heap");
  });
  struct Heap {
    uint64_t base, bytes;
  };
  const std::vector<Heap> heaps = exchange.all_gather(Heap{own_base_, own_bytes_});
  const std::vector<Descriptor> received = exchange_descriptors(exchange, placements, shared);
  exchange.together("mapping the peers' heaps", [&] {
    for (size_t peer = 0; peer < placements.size(); ++peer) {
      if (!received[peer]) {
        base_[peer] = reinterpret_cast<char*>(heaps[peer].base);
        continue;
      }
      imported_[peer] = AddressRange(heaps[peer].bytes);
      imported_[peer].map(import(received[peer]), 0, heaps[peer].bytes, {placements[rank].device});
      base_[peer] = imported_[peer].base();
    }
  });
}

bool PeerHeaps::locate(const void* pointer, size_t bytes, uint64_t* offset) const {
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (own_bytes_ == 0) {
    *offset = address;
    return true;
  }
  if (address < own_base_ || address + bytes > own_base_ + own_bytes_) return false;
  *offset = address - own_base_;
  return true;
}

}  // namespace pk
