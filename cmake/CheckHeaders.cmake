# One object per header: a header that needs another one included first does not compile.
file(GLOB_RECURSE PK_HEADERS CONFIGURE_DEPENDS RELATIVE "${CMAKE_SOURCE_DIR}"
     cuda/*.cuh cuda/*.h ffi/*.h)
foreach(header IN LISTS PK_HEADERS)
  string(MAKE_C_IDENTIFIER "${header}" name)
  cmake_path(GET header EXTENSION LAST_ONLY extension)
  if(extension STREQUAL ".cuh")
    set(source "${CMAKE_BINARY_DIR}/headers/${name}.cu")
  else()
    set(source "${CMAKE_BINARY_DIR}/headers/${name}.cc")
  endif()
  file(CONFIGURE OUTPUT "${source}" CONTENT "#include \"${header}\"\n#include \"${header}\"\n")
  list(APPEND PK_HEADER_SOURCES "${source}")
endforeach()
add_library(pk_headers OBJECT ${PK_HEADER_SOURCES})
target_include_directories(pk_headers SYSTEM PRIVATE "${PK_XLA_INCLUDE}" "${NB_DIR}/include" ${Python_INCLUDE_DIRS})
target_link_libraries(pk_headers PRIVATE pk_tile)

# The example of docs/write_a_kernel.md, from nothing but the headers as they are installed.
add_custom_target(pk_example ALL VERBATIM
  COMMAND "${CMAKE_COMMAND}" --install "${CMAKE_BINARY_DIR}" --component headers --prefix "${CMAKE_BINARY_DIR}/stage"
  COMMAND "${CMAKE_COMMAND}" -E env "CUDACXX=${CMAKE_CUDA_COMPILER}" "${Python_EXECUTABLE}"
          "${CMAKE_SOURCE_DIR}/examples/write_a_kernel/build.py"
          --include "${CMAKE_BINARY_DIR}/stage/pk_jax/include" --include "${PK_XLA_INCLUDE}"
          --output "${CMAKE_BINARY_DIR}/write_a_kernel")
