hcache_test(state_profile_test unit/state_profile_test.cc LIBS hcache_state)
hcache_test(state_batch_policy_test unit/state_batch_policy_test.cc
  LIBS hcache_state hcache_model_tools)
hcache_test(state_device_ring_test unit/state_device_ring_test.cc
  LIBS hcache_state hcache_fake_cufile hcache_test_rpc)
target_include_directories(state_device_ring_test PRIVATE ${CMAKE_SOURCE_DIR}/src/state)
hcache_test(state_restore_test unit/state_restore_test.cc LIBS hcache_state hcache_model_tools)
hcache_test(state_held_match_test unit/state_held_match_test.cc LIBS hcache_state)
hcache_test(state_packed_kv_test unit/state_packed_kv_test.cc LIBS hcache_state)
target_include_directories(state_packed_kv_test PRIVATE ${CMAKE_SOURCE_DIR}/src/state)
