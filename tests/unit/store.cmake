hcache_test(store_store_test unit/store_store_test.cc LIBS hcache_store)
