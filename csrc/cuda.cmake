# The CUDA library. Architectures come from TORCH_CUDA_ARCH_LIST, as for torch extensions, but as
# numbers only. The default is A100 (8.0), H100 and H200 (9.0) and, where nvcc knows them, B200 (10.0,
# whose code B300 runs too) and RTX 50 (12.0). Newer devices compile the PTX.
set(arch_list "$ENV{TORCH_CUDA_ARCH_LIST}")
string(REGEX REPLACE "[ ,]+" ";" arch_list "${arch_list}")

# Set `out` to CMake's names (80-real;90) of `torch_archs`, a list such as 8.0;9.0+PTX.
function(emblib_architectures torch_archs out)
  set(cmake_archs "")
  foreach(arch IN LISTS torch_archs)
    string(REGEX MATCH "^([0-9]+)\\.([0-9]+[af]?)(\\+PTX)?$" matched "${arch}")
    if(NOT matched)
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST: '${arch}' is not of the form 9.0 or 9.0+PTX")
    endif()
    if(CMAKE_MATCH_1 LESS 8)
      message(FATAL_ERROR "emblib needs compute capability 8.0 (A100) or newer; "
        "remove '${arch}' from TORCH_CUDA_ARCH_LIST")
    endif()
    set(cmake_arch "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    if("${CMAKE_MATCH_3}" STREQUAL "+PTX")
      list(APPEND cmake_archs "${cmake_arch}")
    else()
      list(APPEND cmake_archs "${cmake_arch}-real")
    endif()
  endforeach()
  set(${out} "${cmake_archs}" PARENT_SCOPE)
endfunction()

if(arch_list STREQUAL "")
  set(CMAKE_CUDA_ARCHITECTURES 80-real) # for the test of the compiler; the default needs its version
else()
  emblib_architectures("${arch_list}" CMAKE_CUDA_ARCHITECTURES)
endif()
set(CMAKE_CUDA_STANDARD 20)
enable_language(CUDA)
if(arch_list STREQUAL "")
  set(arch_list 8.0 9.0+PTX)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    set(arch_list 8.0 9.0 10.0+PTX 12.0)
  endif()
  emblib_architectures("${arch_list}" CMAKE_CUDA_ARCHITECTURES)
endif()
find_package(CUDAToolkit REQUIRED)

file(GLOB cuda_sources CONFIGURE_DEPENDS "*/*_cuda.cu")
# The files that take longest to compile come first, so that none of them is compiled alone at the end.
foreach(slow_source group/group tbe/lookup hash/hash tt/forward_backward tbe/update)
  list(REMOVE_ITEM cuda_sources "${CMAKE_CURRENT_SOURCE_DIR}/${slow_source}_cuda.cu")
  list(PREPEND cuda_sources "${CMAKE_CURRENT_SOURCE_DIR}/${slow_source}_cuda.cu")
endforeach()
add_library(emblib_cuda SHARED ${cuda_sources})
emblib_unite(emblib_cuda _cuda.cu tt quant cache+group route+optim+random)
target_link_libraries(emblib_cuda PRIVATE torch_stable emblib_cpu CUDA::cudart_static)
target_compile_definitions(emblib_cuda PRIVATE USE_CUDA)
# ptxas reports registers and spills, which a test reads; profilers show lines of sources, whose paths
# do not depend on the machine.
target_compile_options(emblib_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v -Xcompiler=-fmacro-prefix-map=${CMAKE_CURRENT_SOURCE_DIR}/= --expt-relaxed-constexpr -lineinfo>)
set_target_properties(emblib_cuda PROPERTIES CUDA_VISIBILITY_PRESET hidden INSTALL_RPATH "$ORIGIN")
install(TARGETS emblib_cuda DESTINATION emblib)
message(STATUS "emblib: CUDA library for ${CMAKE_CUDA_ARCHITECTURES}")
