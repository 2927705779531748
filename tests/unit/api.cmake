foreach(part conversations json media ollama request reply stop openapi volatile)
  hcache_test(api_${part}_test unit/api_${part}_test.cc LIBS hcache_api)
endforeach()
hcache_test(api_infill_test unit/api_infill_test.cc LIBS hcache_api hcache::ggml)
