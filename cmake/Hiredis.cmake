# hiredis as an imported-like target, hcache::hiredis: the C library that the Python package of that
# name carries, with its TLS part, built from the pinned source distribution.

find_package(OpenSSL REQUIRED)
_hcache_third_party(_hiredis hiredis)
add_library(hcache_lib_hiredis STATIC
  ${_hiredis}/alloc.c
  ${_hiredis}/async.c
  ${_hiredis}/hiredis.c
  ${_hiredis}/net.c
  ${_hiredis}/read.c
  ${_hiredis}/sds.c
  ${_hiredis}/sockcompat.c
  ${_hiredis}/ssl.c
)
target_include_directories(hcache_lib_hiredis SYSTEM PUBLIC ${_hiredis})
target_link_libraries(hcache_lib_hiredis PUBLIC OpenSSL::SSL OpenSSL::Crypto)
add_library(hcache::hiredis ALIAS hcache_lib_hiredis)
