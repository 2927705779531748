hcache_test(cli_llama_flags_test unit/cli_llama_flags_test.cc LIBS hcache_cli)
hcache_test(cli_options_test unit/cli_options_test.cc LIBS hcache_cli)
# What cli_llama_flags_test walks through is what the pinned llama-server takes.
add_test(NAME cli_llama_flags_list_test
         COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/scripts/llama_flags.py --check)
set_tests_properties(cli_llama_flags_list_test PROPERTIES LABELS cli)
