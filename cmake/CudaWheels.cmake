# Chooses nvcc before CUDA is enabled: what the user names (CUDACXX or CMAKE_CUDA_COMPILER), else the PyPI wheels seen by this
# Python if they are complete, else whatever CMake finds on PATH.
# The wheels keep libraries in lib/ while nvcc's own profile says lib64/, and ship no unversioned libcudart.so.
if(DEFINED CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX})
  return()
endif()
execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/find_cuda_wheels.py"
  OUTPUT_VARIABLE PK_CUDA_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(PK_CUDA_ROOT)
  message(STATUS "CUDA compiler from PyPI wheels: ${PK_CUDA_ROOT}")
  set(CMAKE_CUDA_COMPILER "${PK_CUDA_ROOT}/bin/nvcc")
  set(CUDAToolkit_ROOT "${PK_CUDA_ROOT}")
  set(CUDA_CUDART "${PK_CUDA_ROOT}/lib/libcudart.so.13" CACHE FILEPATH "for FindCUDAToolkit; nothing links it")
  string(APPEND CMAKE_CUDA_FLAGS " -L${PK_CUDA_ROOT}/lib")
endif()
