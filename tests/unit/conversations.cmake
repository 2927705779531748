hcache_test(conversations_test unit/conversations_test.cc LIBS hcache_conversations hcache::ggml)
