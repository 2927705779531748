# hcache_test(NAME source... [DEVICE] [SEALED] [PACKED] [LIBS library...])
#
# A GoogleTest program and its CTest entry. NAME begins with its module ("store_catalog_test"),
# and that word is its label: `ctest -L store` runs one module's tests. DEVICE: it runs on the device
# that HCACHE_TEST_DEVICE names (default: cpu), has the label `device` too, and is built by the target
# device_tests. SEALED: it runs a second time, as NAME_sealed, with HCACHE_TEST_STORE_KEY in its
# environment: on encrypted stores. PACKED: the same as NAME_packed, with HCACHE_TEST_PACK: K and V are
# saved packed. Every test program knows
#   HCACHE_TEST_MODEL  the default model's path          HCACHE_TEST_DATA  the folder tests/
#   HCACHE_PROGRAM     the path of the program `hcache`  (string literals)
find_package(GTest REQUIRED)
if(NOT HCACHE_TEST_MODEL)
  _hcache_third_party(_model model)
  set(HCACHE_TEST_MODEL ${_model})
endif()

# Seconds after which a test hangs rather than works.
set(HCACHE_TEST_TIMEOUT 600)
if(HCACHE_SANITIZE)
  set(HCACHE_TEST_TIMEOUT 1800)
endif()
if(HCACHE_VULKAN)
  set(HCACHE_TEST_TIMEOUT 1200)  # a software device compiles its shaders on first use
endif()

add_custom_target(device_tests)

function(hcache_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "DEVICE;SEALED;PACKED" "" "LIBS")
  add_executable(${name} ${arg_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE ${arg_LIBS} GTest::gmock GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE
    HCACHE_TEST_MODEL="${HCACHE_TEST_MODEL}"
    HCACHE_TEST_DATA="${CMAKE_SOURCE_DIR}/tests"
    HCACHE_PROGRAM="${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/hcache")
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name} --gtest_brief=1)
  string(REGEX MATCH "^[^_]+" labels ${name})
  if(arg_DEVICE)
    list(APPEND labels device)
    add_dependencies(device_tests ${name})
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT ${HCACHE_TEST_TIMEOUT})
  if(arg_SEALED)
    add_test(NAME ${name}_sealed COMMAND ${name} --gtest_brief=1)
    set_tests_properties(${name}_sealed PROPERTIES LABELS "${labels}"
      TIMEOUT ${HCACHE_TEST_TIMEOUT} ENVIRONMENT HCACHE_TEST_STORE_KEY=1)
  endif()
  if(arg_PACKED)
    add_test(NAME ${name}_packed COMMAND ${name} --gtest_brief=1)
    set_tests_properties(${name}_packed PROPERTIES LABELS "${labels}"
      TIMEOUT ${HCACHE_TEST_TIMEOUT} ENVIRONMENT HCACHE_TEST_PACK=1)
  endif()
endfunction()
