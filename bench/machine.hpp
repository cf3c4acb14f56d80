// attn_bench: what one core of this machine can do, measured at the start of every run.
#pragma once

#include <cstddef>
#include <string>

namespace bench {

struct machine {
  double peak_flops;      // fused multiply-adds in float, two operations each
  double copy_bandwidth;  // y = a x, bytes read plus bytes written per second
  double read_bandwidth;  // sum of x
};

/// About a second. Each figure is the best of many short trials: noise only ever takes away.
machine measure_machine();
double measure_peak_flops();

std::size_t last_level_cache_bytes();
std::size_t available_memory_bytes();
std::string processor_name();

}  // namespace bench
