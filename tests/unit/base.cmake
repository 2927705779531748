hcache_test(base_cpu_target_test unit/base_cpu_target_test.cc LIBS hcache_base)
foreach(part env host_memory ids memory throttled_env units)
  hcache_test(base_${part}_test unit/base_${part}_test.cc LIBS hcache_base)
endforeach()
