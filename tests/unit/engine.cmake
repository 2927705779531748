hcache_test(engine_attention_test unit/engine_attention_test.cc LIBS hcache_attention)
hcache_test(engine_arena_test unit/engine_arena_test.cc LIBS hcache_engine)
target_include_directories(engine_arena_test PRIVATE ${CMAKE_SOURCE_DIR}/src/engine)
hcache_test(engine_step_plan_test unit/engine_step_plan_test.cc LIBS hcache_engine)
target_include_directories(engine_step_plan_test PRIVATE ${CMAKE_SOURCE_DIR}/src/engine)
hcache_test(engine_step_test unit/engine_step_test.cc LIBS hcache_engine hcache_model_tools)
hcache_test(engine_sequence_test unit/engine_sequence_test.cc LIBS hcache_engine hcache_model_tools)
hcache_test(engine_rows_test unit/engine_rows_test.cc LIBS hcache_engine hcache_model_tools)
target_include_directories(engine_rows_test PRIVATE ${CMAKE_SOURCE_DIR}/src/engine)
hcache_test(engine_hybrid_test unit/engine_hybrid_test.cc LIBS hcache_engine hcache_model_tools)
hcache_test(engine_hybrid_faults_test unit/engine_hybrid_faults_test.cc
  LIBS hcache_engine hcache_model_tools)

# Tests that link hcache_test_rpc may start the RPC server of rpc_server.h.
add_executable(hcache_rpc_test_server unit/rpc_server_main.cc)
target_link_libraries(hcache_rpc_test_server PRIVATE hcache::ggml)
set_target_properties(hcache_rpc_test_server PROPERTIES
  RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
add_library(hcache_test_rpc INTERFACE)
target_compile_definitions(hcache_test_rpc INTERFACE
  HCACHE_TEST_RPC_SERVER="$<TARGET_FILE:hcache_rpc_test_server>")
add_dependencies(hcache_test_rpc hcache_rpc_test_server)

hcache_test(engine_stage_test unit/engine_stage_test.cc
  LIBS hcache_engine hcache_model_tools hcache_test_rpc)
hcache_test(engine_shared_test unit/engine_shared_test.cc
  LIBS hcache_engine hcache_model_tools hcache_test_rpc)
hcache_test(engine_pipeline_test unit/engine_pipeline_test.cc
  LIBS hcache_engine hcache_model_tools hcache_test_rpc)
hcache_test(engine_restore_test unit/engine_restore_test.cc DEVICE
  LIBS hcache_engine hcache_model_tools hcache_test_rpc)
hcache_test(engine_hidden_type_test unit/engine_hidden_type_test.cc
  LIBS hcache_engine hcache_model_tools hcache_test_rpc)
hcache_test(engine_oracle_test unit/engine_oracle_test.cc
  LIBS hcache_engine hcache_model_tools hcache_products hcache::llama)
# With ggml's products every bit is libllama's.
add_test(NAME engine_oracle_test_ggml COMMAND engine_oracle_test --gtest_brief=1)
set_tests_properties(engine_oracle_test_ggml PROPERTIES LABELS engine
  TIMEOUT ${HCACHE_TEST_TIMEOUT} ENVIRONMENT HCACHE_PRODUCTS=ggml)
hcache_test(engine_weights_test unit/engine_weights_test.cc
  LIBS hcache_engine hcache_model_tools hcache_products hcache_test_rpc)
hcache_test(engine_windows_test unit/engine_windows_test.cc LIBS hcache_engine hcache_model_tools)
target_include_directories(engine_windows_test PRIVATE ${CMAKE_SOURCE_DIR}/src/engine)
