hcache_test(server_observing_test unit/server_observing_test.cc LIBS hcache_server hcache_batches)
target_include_directories(server_observing_test PRIVATE ${CMAKE_SOURCE_DIR}/src/server/service)
