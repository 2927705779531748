hcache_test(base_cpu_target_test unit/base_cpu_target_test.cc LIBS hcache_base)
foreach(part base64 env host_memory ids memory pace process stall throttled_env units)
  hcache_test(base_${part}_test unit/base_${part}_test.cc LIBS hcache_base)
endforeach()

# A library that stands for NVIDIA's cuFile, for tests that link hcache_fake_cufile.
add_library(hcache_fake_cufile_library SHARED unit/fake_cufile.cc)
add_library(hcache_fake_cufile INTERFACE)
target_compile_definitions(hcache_fake_cufile INTERFACE
  HCACHE_FAKE_CUFILE="$<TARGET_FILE:hcache_fake_cufile_library>")
target_link_libraries(hcache_fake_cufile INTERFACE ${CMAKE_DL_LIBS})
add_dependencies(hcache_fake_cufile hcache_fake_cufile_library)
hcache_test(base_direct_storage_test unit/base_direct_storage_test.cc
  LIBS hcache_base hcache_fake_cufile)
