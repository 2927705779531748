foreach(part batch prefix_cache saved_chains serving shared_link trace workload)
  hcache_test(sim_${part}_test unit/sim_${part}_test.cc LIBS hcache_sim)
endforeach()
# What the public headers don't show.
foreach(part saved_chains shared_link)
  target_include_directories(sim_${part}_test PRIVATE ${CMAKE_SOURCE_DIR}/src/sim)
endforeach()
