foreach(part prefix_cache trace)
  hcache_test(sim_${part}_test unit/sim_${part}_test.cc LIBS hcache_sim)
endforeach()
