hcache_test(serving_executor_test unit/serving_executor_test.cc LIBS hcache_serving hcache_model_tools)
target_include_directories(serving_executor_test PRIVATE ${CMAKE_SOURCE_DIR}/src/serving)
hcache_test(serving_pipeline_test unit/serving_pipeline_test.cc
  LIBS hcache_serving hcache_model_tools hcache_test_rpc)
target_include_directories(serving_pipeline_test PRIVATE ${CMAKE_SOURCE_DIR}/src/serving)
hcache_test(serving_shared_test unit/serving_shared_test.cc
  LIBS hcache_serving hcache_model_tools hcache_test_rpc)
hcache_test(serving_restore_test unit/serving_restore_test.cc DEVICE PACKED
  LIBS hcache_serving hcache_model_tools hcache::llama)
hcache_test(serving_conversation_test unit/serving_conversation_test.cc PACKED
  LIBS hcache_serving hcache_model_tools hcache::llama)
hcache_test(serving_batch_test unit/serving_batch_test.cc PACKED
  LIBS hcache_serving hcache_model_tools hcache::llama)
hcache_test(serving_truncation_test unit/serving_truncation_test.cc PACKED
  LIBS hcache_serving hcache_model_tools hcache::llama)
hcache_test(serving_windows_test unit/serving_windows_test.cc PACKED
  LIBS hcache_serving hcache_model_tools hcache::llama)
hcache_test(serving_kept_test unit/serving_kept_test.cc
  LIBS hcache_serving hcache_model_tools hcache::llama)
hcache_test(serving_adapters_test unit/serving_adapters_test.cc
  LIBS hcache_serving hcache_model_tools hcache::llama)
hcache_test(serving_drafting_test unit/serving_drafting_test.cc
  LIBS hcache_serving hcache_model_tools hcache::llama)
hcache_test(serving_media_test unit/serving_media_test.cc SEALED
  LIBS hcache_serving hcache_model_tools)
hcache_test(serving_llama_test unit/serving_llama_test.cc SEALED
  LIBS hcache_serving hcache_model_tools hcache::llama)
