# llama.cpp's libmtmd, pictures and sounds for models, as hcache::mtmd. llama.cpp builds it with its
# tools alone, so it is compiled here, of the sources that libllama comes from.
set(_mtmd ${HCACHE_LLAMA_SOURCE_DIR}/tools/mtmd)
set(_vendor_hash ${HCACHE_LLAMA_SOURCE_DIR}/vendor/hash)
file(GLOB _mtmd_models CONFIGURE_DEPENDS ${_mtmd}/models/*.cpp)
add_library(hcache_lib_mtmd STATIC
  ${_mtmd}/clip.cpp ${_mtmd}/mtmd.cpp ${_mtmd}/mtmd-audio.cpp ${_mtmd}/mtmd-helper.cpp
  ${_mtmd}/mtmd-image.cpp ${_mtmd_models} ${_vendor_hash}/hash.cpp ${_vendor_hash}/sha256/sha256.c)
target_compile_options(hcache_lib_mtmd PRIVATE -w)
target_include_directories(hcache_lib_mtmd SYSTEM
  PUBLIC ${_mtmd}
  PRIVATE ${HCACHE_LLAMA_SOURCE_DIR} ${HCACHE_LLAMA_SOURCE_DIR}/vendor ${_vendor_hash})
target_link_libraries(hcache_lib_mtmd PUBLIC hcache::ggml PRIVATE hcache::llama)
add_library(hcache::mtmd ALIAS hcache_lib_mtmd)
