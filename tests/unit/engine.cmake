hcache_test(engine_attention_test unit/engine_attention_test.cc LIBS hcache_attention)
hcache_test(engine_arena_test unit/engine_arena_test.cc LIBS hcache_engine)
target_include_directories(engine_arena_test PRIVATE ${CMAKE_SOURCE_DIR}/src/engine)
hcache_test(engine_step_test unit/engine_step_test.cc LIBS hcache_engine hcache_model_tools)
