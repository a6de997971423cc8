# Finds nvcc: CMAKE_CUDA_COMPILER or CUDACXX if set, the one on the PATH or in /usr/local/cuda, or the one that
# launch/setup put into build/.
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(KVFERRY_NVCC nvcc
    PATHS /usr/local/cuda/bin ${PROJECT_SOURCE_DIR}/build/cuda-toolkit/nvidia/cu13/bin REQUIRED)
  set(CMAKE_CUDA_COMPILER ${KVFERRY_NVCC})
endif()
set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100
  CACHE STRING "GPU architectures to compile for; one without -real also gets PTX for later GPUs")
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  # nvcc supports sm_100 from 12.8 on; an older one emits PTX, which the drivers of newer GPUs compile.
  list(REMOVE_ITEM CMAKE_CUDA_ARCHITECTURES 100)
  list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^90-real$" "90")
endif()
set(targets "")
foreach(architecture ${CMAKE_CUDA_ARCHITECTURES})  # 90-real: machine code, 90-virtual: PTX, 90: both
  string(REGEX MATCH "^[^-]+" number ${architecture})
  if(NOT architecture MATCHES "-virtual$")
    list(APPEND targets sm_${number})
  endif()
  if(NOT architecture MATCHES "-real$")
    list(APPEND targets "PTX of compute_${number}")
  endif()
endforeach()
list(JOIN targets ", " KVFERRY_CUDA_TARGETS)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.5)
  message(FATAL_ERROR "nvcc is ${CMAKE_CUDA_COMPILER_VERSION}; kvferry needs 12.5 or later")
endif()
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 supports nvcc only up to C++17
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_STANDARD 20)
find_package(CUDAToolkit REQUIRED)
