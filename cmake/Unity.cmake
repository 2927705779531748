# hcache_unity(DIRECTORY): compiles the sources of every C++ target below a folder in groups of eight
# (HCACHE_UNITY). Most of a file's time goes into headers that all share, so this takes a third of the
# time from nothing, and more after a change.
function(hcache_unity directory)
  get_property(targets DIRECTORY ${directory} PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target ${targets})
    get_target_property(type ${target} TYPE)
    if(type MATCHES "^(STATIC_LIBRARY|EXECUTABLE)$")
      get_target_property(sources ${target} SOURCES)
      get_target_property(folder ${target} SOURCE_DIR)
      list(FILTER sources INCLUDE REGEX "\\.cc$")
      list(TRANSFORM sources PREPEND ${folder}/ REGEX "^[^/]")
      # Starting the script for each of the many programs with one source takes longer than all else
      # that is done here.
      list(LENGTH sources n_sources)
      set(rows "0=${sources}")
      if(n_sources GREATER 1)
        execute_process(
          COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/scripts/unity_groups.py 8 ${sources}
          OUTPUT_VARIABLE rows OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
      endif()
      string(REPLACE "\n" ";" rows "${rows}")
      foreach(row ${rows})
        string(REGEX MATCH "^([0-9]+)=(.*)$" _ ${row})
        set_source_files_properties(${CMAKE_MATCH_2} TARGET_DIRECTORY ${target}
                                    PROPERTIES UNITY_GROUP ${CMAKE_MATCH_1})
      endforeach()
      set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
    endif()
  endforeach()
  get_property(folders DIRECTORY ${directory} PROPERTY SUBDIRECTORIES)
  foreach(folder ${folders})
    hcache_unity(${folder})
  endforeach()
endfunction()
