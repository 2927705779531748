hcache_test(state_profile_test unit/state_profile_test.cc LIBS hcache_state)
