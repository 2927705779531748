hcache_test(encoder_queue_test unit/encoder_queue_test.cc LIBS hcache_encoder)
target_include_directories(encoder_queue_test PRIVATE ${CMAKE_SOURCE_DIR}/src/server/encoder)
