// Tensor maps of batches of row-major matrices, made on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace pk {

struct Matrix {
  void* address;
  int64_t rows, cols;  // elements
  int64_t pitch;       // elements from row to row
  int64_t batch = 1;   // matrices, one right after the other
};

// The map of boxes of box_rows x box_cols elements of one matrix (a box's row has 128 bytes at
// most: the swizzle). Address and pitch must be multiples of 16 bytes. cudaErrorNotSupported
// without a driver that has tensor maps, cudaErrorInvalidValue if it refuses this one.
inline cudaError_t make_tensor_map(CUtensorMap* map, const Matrix& matrix, CUtensorMapDataType type,
                                   uint32_t element_bytes, uint32_t box_rows, uint32_t box_cols) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &found);
    return status == cudaSuccess ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)
                                 : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(matrix.cols),
                               static_cast<cuuint64_t>(matrix.rows),
                               static_cast<cuuint64_t>(matrix.batch)};
  const auto pitch_bytes = static_cast<cuuint64_t>(matrix.pitch) * element_bytes;
  const cuuint64_t pitches[2] = {pitch_bytes, pitch_bytes * sizes[1]};
  const cuuint32_t box[3] = {box_cols, box_rows, 1}, steps[3] = {1, 1, 1};
  const CUresult status =
      encode(map, type, 3, matrix.address, sizes, pitches, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Of elements of 16 bits.
inline cudaError_t make_tensor_map(CUtensorMap* map, const Matrix& matrix, bool bfloat16,
                                   uint32_t box_rows, uint32_t box_cols) {
  const auto type = bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return make_tensor_map(map, matrix, type, 2, box_rows, box_cols);
}

// Of fp32: a box's row has 32 elements at most.
inline cudaError_t make_float32_tensor_map(CUtensorMap* map, const Matrix& matrix,
                                           uint32_t box_rows, uint32_t box_cols) {
  return make_tensor_map(map, matrix, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, box_rows, box_cols);
}

}  // namespace pk
