foreach(part schedule stream report)
  hcache_test(load_${part}_test unit/load_${part}_test.cc LIBS hcache_load)
endforeach()
