foreach(part choice files servers swap)
  hcache_test(router_${part}_test unit/router_${part}_test.cc LIBS hcache_router hcache_api)
  target_include_directories(router_${part}_test PRIVATE ${CMAKE_SOURCE_DIR}/src/server/router)
endforeach()
