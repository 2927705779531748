hcache_test(model_device_test unit/model_device_test.cc LIBS hcache_model)
hcache_test(model_weight_plan_test unit/model_weight_plan_test.cc LIBS hcache_model)
# These look behind the public headers.
foreach(test weight_types loader corrupt split tools placement shares)
  hcache_test(model_${test}_test unit/model_${test}_test.cc LIBS hcache_model_tools)
  target_include_directories(model_${test}_test PRIVATE ${CMAKE_SOURCE_DIR}/src/model)
endforeach()
hcache_test(model_products_test unit/model_products_test.cc LIBS hcache_products)
target_link_libraries(model_weight_types_test PRIVATE hcache_products)
