hcache_test(state_profile_test unit/state_profile_test.cc LIBS hcache_state)
hcache_test(state_batch_policy_test unit/state_batch_policy_test.cc
  LIBS hcache_state hcache_model_tools)
