hcache_test(store_store_test unit/store_store_test.cc LIBS hcache_store)
hcache_test(store_archive_test unit/store_archive_test.cc LIBS hcache_store)
target_include_directories(store_archive_test PRIVATE ${CMAKE_SOURCE_DIR}/src/store)
