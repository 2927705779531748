foreach(part json request reply stop openapi)
  hcache_test(api_${part}_test unit/api_${part}_test.cc LIBS hcache_api)
endforeach()
