// attn_bench: what one core of this machine can do, measured in the same run as the operators.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace bench {

/// Clocks move: with the load, with neighbours on the same chip, with the use of wide vectors. The peak that counts is
/// the sustained one, so it is measured again and again between the operators.
class machine {
 public:
  /// Takes about a second. Called again, it keeps the higher bandwidths: disturbances only ever lower them.
  void measure();
  /// One measurement of the peak: 5 ms. For between the operators.
  void sample_peak();

  /// Fused multiply-adds in float, two operations each, per second: the median of the measurements so far.
  double peak_flops() const { return peak_quantile(0.5); }
  double peak_quantile(double share) const;
  std::size_t peak_samples() const { return peaks_.size(); }

  double read_bandwidth() const { return read_bandwidth_; }        // bytes per second; sum of x
  double rewrite_bandwidth() const { return rewrite_bandwidth_; }  // x = a x in place: bytes read plus bytes written

 private:
  std::vector<double> peaks_;
  double read_bandwidth_ = 0, rewrite_bandwidth_ = 0;
};

std::size_t last_level_cache_bytes();
std::size_t available_memory_bytes();
std::string processor_name();

}  // namespace bench
