hcache_test(libllama_encoder_test unit/libllama_encoder_test.cc
  LIBS hcache_libllama hcache_text hcache_model_tools hcache::llama)
hcache_test(libllama_media_test unit/libllama_media_test.cc
  LIBS hcache_libllama hcache_text hcache_model_tools hcache::llama hcache::mtmd)
