# ggml and llama.cpp as imported targets:
#   hcache::ggml    ggml with its CPU and RPC backends (and CUDA where HCACHE_CUDA is on, Vulkan where
#                   HCACHE_VULKAN is)
#   hcache::llama   libllama and llama.cpp's common library; its headers are <llama.h> and,
#                   for common, "chat.h", "sampling.h", <nlohmann/json.hpp> (llama.cpp's copy)
# and the variable
#   HCACHE_CPU_TARGETS  what there are CPU kernels for, e.g. x86-64-v4+vnni: the machine's target, or,
#                       with HCACHE_PORTABLE, every one, the best first
#
# With HCACHE_PORTABLE the CPU kernels are modules, which lie in lib/hcache beside the folder of the
# program and are loaded from there (HCACHE_KERNEL_FOLDER, relative to that folder).
#
# They come from the cache that scripts/third_party.py fills, or from HCACHE_LLAMA_PREFIX: a
# folder with lib/ and include/ of an installed llama.cpp of the same version, whose source tree is
# HCACHE_LLAMA_SOURCE: the headers of its common library and of libllama's insides.

find_package(Python3 REQUIRED COMPONENTS Interpreter)
find_package(Threads REQUIRED)
set(_third_party ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/scripts/third_party.py)
# What decides about the library must re-run the configuration.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
             ${CMAKE_SOURCE_DIR}/scripts/third_party.py ${CMAKE_SOURCE_DIR}/scripts/vulkan_sdk.py
             ${CMAKE_SOURCE_DIR}/scripts/tested_glslc.sh.in)

# Runs third_party.py and returns what it prints; its progress and errors go to the terminal.
function(_hcache_third_party out)
  execute_process(COMMAND ${_third_party} ${ARGN} OUTPUT_VARIABLE text RESULT_VARIABLE code
                  OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "scripts/third_party.py ${ARGN} failed (its message stands above)")
  endif()
  set(${out} "${text}" PARENT_SCOPE)
endfunction()

if(HCACHE_LLAMA_PREFIX)
  set(_prefix ${HCACHE_LLAMA_PREFIX})
  set(HCACHE_CPU_TARGETS "installed")
else()
  set(_compilers --cc ${CMAKE_C_COMPILER} --cxx ${CMAKE_CXX_COMPILER})
  set(_options ${_compilers})
  if(HCACHE_SANITIZE)
    list(APPEND _options --sanitize ${HCACHE_SANITIZE})
  endif()
  if(HCACHE_CUDA)
    string(REPLACE ";" "," _archs "${HCACHE_CUDA_ARCHS}")
    list(APPEND _options --cuda ${_archs})
  endif()
  _hcache_third_party(_prefix llama ${_options})
  if(HCACHE_VULKAN)
    _hcache_third_party(_vulkan vulkan ${_compilers} --shaders ${HCACHE_VULKAN_SHADERS})
  endif()
  _hcache_third_party(HCACHE_CPU_TARGETS cpu-target)
endif()
if(HCACHE_PORTABLE)
  if(HCACHE_LLAMA_PREFIX OR HCACHE_SANITIZE OR HCACHE_CUDA OR HCACHE_VULKAN)
    message(FATAL_ERROR "HCACHE_PORTABLE goes with none of HCACHE_LLAMA_PREFIX, HCACHE_SANITIZE, "
                        "HCACHE_CUDA and HCACHE_VULKAN")
  endif()
  _hcache_third_party(_kernels kernels ${_compilers})
  _hcache_third_party(HCACHE_CPU_TARGETS cpu-target --portable)
  set(HCACHE_KERNEL_FOLDER ../lib/hcache)
  file(COPY ${_kernels}/kernels/ DESTINATION ${CMAKE_BINARY_DIR}/lib/hcache)
endif()
message(STATUS "ggml and llama.cpp: ${_prefix} (CPU targets ${HCACHE_CPU_TARGETS})")

set(_common ${_prefix}/include/common)
set(_vendor ${_prefix}/include/common)
if(HCACHE_LLAMA_SOURCE)
  set(_common ${HCACHE_LLAMA_SOURCE}/common)
  set(_vendor ${HCACHE_LLAMA_SOURCE}/vendor)
endif()
if(NOT EXISTS ${_prefix}/include/ggml-rpc.h OR NOT EXISTS ${_common}/chat.h)
  message(FATAL_ERROR "${_prefix} lacks include/ggml-rpc.h or llama.cpp's common headers "
                      "(${_common}/chat.h); see docs/howto/build.md")
endif()

# Adds the imported library hcache_lib_<name> from the prefix; ARGN is what it links to.
function(_hcache_import name)
  set(folders ${_prefix}/lib ${_prefix}/lib64)
  if(HCACHE_PORTABLE AND name STREQUAL "ggml")
    set(folders ${_kernels}/lib)  # the one without a CPU backend
  elseif(DEFINED _vulkan)
    list(PREPEND folders ${_vulkan}/lib)
  endif()
  # No cache variable: the prefix changes with the machine and the options.
  find_library(path NAMES ${name} PATHS ${folders} NO_DEFAULT_PATH NO_CACHE REQUIRED)
  add_library(hcache_lib_${name} UNKNOWN IMPORTED GLOBAL)
  set_target_properties(hcache_lib_${name} PROPERTIES IMPORTED_LOCATION ${path})
  target_link_libraries(hcache_lib_${name} INTERFACE ${ARGN})
endfunction()

set(_needs Threads::Threads m dl)
if(NOT HCACHE_SANITIZE STREQUAL "thread")
  find_package(OpenMP REQUIRED COMPONENTS CXX)
  list(APPEND _needs ${OpenMP_CXX_LIBRARIES})
endif()
_hcache_import(ggml-base ${_needs})
_hcache_import(ggml-rpc hcache_lib_ggml-base)
set(_backends hcache_lib_ggml-rpc)
if(HCACHE_PORTABLE)
  # The kernels' modules take everything else of ggml from the program.
  get_target_property(_base hcache_lib_ggml-base IMPORTED_LOCATION)
  target_link_options(hcache_lib_ggml-base INTERFACE
    -Wl,--whole-archive,${_base},--no-whole-archive
    -Wl,--dynamic-list=${CMAKE_CURRENT_LIST_DIR}/kernels/exports.txt)
else()
  _hcache_import(ggml-cpu hcache_lib_ggml-base)
  list(PREPEND _backends hcache_lib_ggml-cpu)
endif()
if(HCACHE_CUDA)
  find_package(CUDAToolkit REQUIRED)
  _hcache_import(ggml-cuda hcache_lib_ggml-base CUDA::cudart CUDA::cublas CUDA::cuda_driver)
  list(APPEND _backends hcache_lib_ggml-cuda)
endif()
if(HCACHE_VULKAN)
  _hcache_third_party(_loader vulkan-loader)
  add_library(hcache_lib_vulkan UNKNOWN IMPORTED GLOBAL)
  set_target_properties(hcache_lib_vulkan PROPERTIES IMPORTED_LOCATION ${_loader})
  _hcache_import(ggml-vulkan hcache_lib_ggml-base hcache_lib_vulkan)
  list(APPEND _backends hcache_lib_ggml-vulkan)
endif()
_hcache_import(ggml ${_backends} hcache_lib_ggml-base)
add_library(hcache::ggml INTERFACE IMPORTED GLOBAL)
target_link_libraries(hcache::ggml INTERFACE hcache_lib_ggml)
target_include_directories(hcache::ggml INTERFACE ${_prefix}/include)

_hcache_import(llama hcache::ggml)
set(_needs hcache_lib_llama)
foreach(name llama-common-base cpp-httplib)  # separate only where the libraries are static
  if(EXISTS ${_prefix}/lib/lib${name}.a)
    _hcache_import(${name} Threads::Threads)
    list(APPEND _needs hcache_lib_${name})
  endif()
endforeach()
_hcache_import(llama-common ${_needs})
add_library(hcache::llama INTERFACE IMPORTED GLOBAL)
target_link_libraries(hcache::llama INTERFACE hcache_lib_llama-common hcache_lib_llama)
target_include_directories(hcache::llama INTERFACE ${_prefix}/include ${_common} ${_vendor})
target_compile_definitions(hcache::llama INTERFACE LLAMA_SUBPROCESS)

# libllama's own headers, which nobody installs: those of the very version that was built.
if(HCACHE_LLAMA_SOURCE)
  set(_source ${HCACHE_LLAMA_SOURCE})
elseif(HCACHE_LLAMA_PREFIX)
  message(FATAL_ERROR "HCACHE_LLAMA_PREFIX needs HCACHE_LLAMA_SOURCE beside it: libllama's own headers "
                      "are not installed; see docs/howto/build.md")
else()
  _hcache_third_party(_source llama-source)
endif()
file(SHA256 ${_source}/include/llama.h _of_source)
file(SHA256 ${_prefix}/include/llama.h _of_prefix)
if(NOT _of_source STREQUAL _of_prefix)
  message(FATAL_ERROR "${_source} and ${_prefix} are of different versions of llama.cpp: their llama.h "
                      "differ")
endif()
set(HCACHE_LLAMA_SOURCE_DIR ${_source})
set(HCACHE_LLAMA_PRIVATE_INCLUDE ${_source}/src)
