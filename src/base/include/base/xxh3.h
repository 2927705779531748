// xxHash's XXH3. On x86-64 its functions choose the widest vectors of the CPU at run time, where
// the installed library has that part.
#pragma once

#define XXH_STATIC_LINKING_ONLY  // for states on the stack
#include <xxhash.h>

#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>
#endif
