foreach(part batching chain_order compression cost drafting eviction miss_cost overlap pipeline restore_plan save_plan fetch hardware_plan
             hybrid_cache hybrid_pipeline hybrid_plan linear_fit packing queue
             read_order report snapshots truncation wanted)
  hcache_test(policy_${part}_test unit/policy_${part}_test.cc LIBS hcache_policy)
endforeach()
# The pipeline's algebra is private to the module and tested against plain simulation.
target_include_directories(policy_pipeline_test PRIVATE ${CMAKE_SOURCE_DIR}/src/policy)
