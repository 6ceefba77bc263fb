// Memory that every rank of a group owns a piece of and can address all pieces of.
//
// A region is a stretch of reserved addresses, backed by memory only as far as it has grown.
// Growing never moves it: an address handed to a kernel, or baked into a captured CUDA graph, stays
// good for the life of the region.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "runtime/exchange.h"
#include "runtime/process.h"

namespace pk {

// Reserved addresses and what is mapped there; unmapped and given back by the destructor.
class AddressRange {
 public:
  AddressRange() = default;
  explicit AddressRange(size_t bytes);
  AddressRange(AddressRange&& other) noexcept;
  AddressRange& operator=(AddressRange&& other) noexcept;
  ~AddressRange();

  // Takes the reference to `memory`: it is released whether or not the call succeeds.
  void map(CUmemGenericAllocationHandle memory, size_t offset, size_t bytes,
           const std::vector<int>& devices);
  // Undoes the map at `offset`, if there is one.
  void unmap(size_t offset);
  char* base() const { return reinterpret_cast<char*>(base_); }

 private:
  struct Piece {
    size_t offset;
    size_t bytes;
  };
  CUdeviceptr base_ = 0;
  size_t bytes_ = 0;
  std::vector<Piece> pieces_;
};

class SymmetricRegion {
 public:
  // Collective. Reserves `most` bytes of address space a rank, and backs none of it.
  SymmetricRegion(Exchange& exchange, const std::vector<Placement>& placements, size_t most);

  // Collective, with the same `bytes` on every rank. Backs the first `bytes` of every rank's piece;
  // new memory is zero on return. Waits for `stream`.
  void grow(Exchange& exchange, size_t bytes, cudaStream_t stream);

  size_t bytes() const { return bytes_; }
  // Where the piece of `rank` is, seen from this rank.
  char* base(int rank) const { return base_[rank]; }

 private:
  void back(Exchange& exchange, size_t target, cudaStream_t stream);

  std::vector<Placement> placements_;
  int rank_;
  size_t most_ = 0;
  size_t granularity_ = 0;
  size_t bytes_ = 0;
  std::vector<int> local_devices_;
  AddressRange own_;
  std::vector<AddressRange> imported_;  // [rank]; used for ranks of other processes
  std::vector<char*> base_;
};

// The allocation that holds `pointer`, mapped by every other process of the group: XLA's heap, in
// practice. Collective. `base(rank)` is where rank's allocation starts, seen from here.
class PeerHeaps {
 public:
  PeerHeaps(Exchange& exchange, const std::vector<Placement>& placements, const void* pointer);

  // Offset of `pointer` within this rank's own exported allocation; false if it lies elsewhere.
  bool locate(const void* pointer, size_t bytes, uint64_t* offset) const;
  char* base(int rank) const { return base_[rank]; }

 private:
  CUdeviceptr own_base_ = 0;
  size_t own_bytes_ = 0;
  std::vector<AddressRange> imported_;
  std::vector<char*> base_;
};

}  // namespace pk
