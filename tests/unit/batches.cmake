hcache_test(batches_file_test unit/batches_file_test.cc LIBS hcache_batches)
hcache_test(batches_server_test unit/batches_server_test.cc LIBS hcache_batches)
