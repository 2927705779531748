hcache_test(batches_file_test unit/batches_file_test.cc LIBS hcache_batches)
