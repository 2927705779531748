// Units at the edges: what people type and read. Inside, bytes, bytes/s and nanoseconds.
//
// Threading: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace hcache {

// "64MiB", "1.5 GB", "4096", "512k": decimal (kB, MB, GB, TB) and binary (KiB, MiB, GiB, TiB)
// units; a single letter (k, m, g, t) is binary, a bare number is bytes. Case does not matter.
// invalid_argument names the text.
[[nodiscard]] Result<std::uint64_t> parse_bytes(std::string_view text);
// As parse_bytes with an optional "/s": "19MB/s", "1.7GB/s". Bytes per second.
[[nodiscard]] Result<double> parse_rate(std::string_view text);
// "250ms", "30s", "1.5h", "2m30s", "7d"; ns, us, ms, s, m, h, d. A bare number is seconds.
// Nanoseconds.
[[nodiscard]] Result<std::int64_t> parse_duration(std::string_view text);

// "64 MiB", "1.50 GiB", "900 B".
[[nodiscard]] std::string format_bytes(std::uint64_t bytes);
// "19.0 MB/s" (decimal, as links are sold).
[[nodiscard]] std::string format_rate(double bytes_per_s);
// "812 ns", "3.2 ms", "1.50 s", "2m 30s".
[[nodiscard]] std::string format_duration(std::int64_t ns);

}  // namespace hcache
