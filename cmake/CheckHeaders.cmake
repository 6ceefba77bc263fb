# One object per header: a header that needs another one included first does not compile.
file(GLOB_RECURSE PK_HEADERS CONFIGURE_DEPENDS RELATIVE "${CMAKE_SOURCE_DIR}"
     cuda/*.cuh cuda/*.h ffi/*.h)
foreach(header IN LISTS PK_HEADERS)
  string(MAKE_C_IDENTIFIER "${header}" name)
  cmake_path(GET header EXTENSION LAST_ONLY extension)
  if(extension STREQUAL ".cuh")
    set(source "${CMAKE_BINARY_DIR}/headers/${name}.cu")
    list(APPEND PK_CUDA_HEADER_SOURCES "${source}")
  else()
    set(source "${CMAKE_BINARY_DIR}/headers/${name}.cc")
    list(APPEND PK_CXX_HEADER_SOURCES "${source}")
  endif()
  file(CONFIGURE OUTPUT "${source}" CONTENT "#include \"${header}\"\n#include \"${header}\"\n")
endforeach()
add_library(pk_headers OBJECT ${PK_CXX_HEADER_SOURCES})
add_library(pk_cuda_headers OBJECT ${PK_CUDA_HEADER_SOURCES})
# Names are looked up before there is PTX; machine code and a second pass for the host find no more.
set_target_properties(pk_cuda_headers PROPERTIES CUDA_PTX_COMPILATION ON)
foreach(target pk_headers pk_cuda_headers)
  target_include_directories(${target} SYSTEM PRIVATE "${PK_XLA_INCLUDE}" "${NB_DIR}/include" ${Python_INCLUDE_DIRS})
  target_link_libraries(${target} PRIVATE pk_tile)
endforeach()

# What kernels record for timelines is not in the library: the kernels that do are parsed by their headers, and who reads it is compiled.
add_library(pk_timeline OBJECT cuda/runtime/timeline.cc
            "${CMAKE_BINARY_DIR}/headers/cuda_kernels_all_gather_matmul_cuh.cu"
            "${CMAKE_BINARY_DIR}/headers/cuda_kernels_matmul_reduce_cuh.cu")
set_target_properties(pk_timeline PROPERTIES CUDA_PTX_COMPILATION ON)
target_compile_definitions(pk_timeline PRIVATE PK_JAX_TIMELINE)
target_link_libraries(pk_timeline PRIVATE pk_tile)

# The example of docs/write_a_kernel.md, from nothing but the headers as they are installed.
add_custom_target(pk_example ALL VERBATIM
  COMMAND "${CMAKE_COMMAND}" --install "${CMAKE_BINARY_DIR}" --component headers --prefix "${CMAKE_BINARY_DIR}/stage"
  COMMAND "${CMAKE_COMMAND}" -E env "CUDACXX=${CMAKE_CUDA_COMPILER}" "${Python_EXECUTABLE}"
          "${CMAKE_SOURCE_DIR}/examples/write_a_kernel/build.py"
          --include "${CMAKE_BINARY_DIR}/stage/pk_jax/include" --include "${PK_XLA_INCLUDE}"
          --output "${CMAKE_BINARY_DIR}/write_a_kernel")
