// Tensor maps of row-major matrices of 16-bit elements, made on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace pk {

struct Matrix {
  void* address;
  int64_t rows, cols;  // elements
  int64_t pitch;       // elements from row to row
};

// The map of boxes of box_rows x box_cols elements (box_cols at most 64: the 128-byte swizzle).
// Address and pitch must be multiples of 16 bytes. cudaErrorNotSupported without a driver that has
// tensor maps, cudaErrorInvalidValue if it refuses this one.
inline cudaError_t make_tensor_map(CUtensorMap* map, const Matrix& matrix, bool bfloat16,
                                   uint32_t box_rows, uint32_t box_cols) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &found);
    return status == cudaSuccess ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)
                                 : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(matrix.cols),
                               static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t pitch_bytes[1] = {static_cast<cuuint64_t>(matrix.pitch) * 2};
  const cuuint32_t box[2] = {box_cols, box_rows}, steps[2] = {1, 1};
  const CUresult status =
      encode(map, bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
             matrix.address, sizes, pitch_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace pk
