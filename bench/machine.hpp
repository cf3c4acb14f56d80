// attn_bench: what this machine can do, one thread of it and all that are used, measured in the same run as the operators.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace bench {

/// What numbers are multiplied as.
enum class arithmetic { of_float, of_double, of_bf16 };

/// Clocks move: with the load, with neighbours on the same chip, with the use of wide vectors. The peak that counts is
/// the sustained one, so it is measured again and again between the operators.
///
/// Of several threads it is measured with all of them at work: they may share cores, and they do share memory.
class machine {
 public:
  /// With `threads` threads, or with as many that are simulated (virtual_threads.hpp), each of which has a core like
  /// that of one thread, and its memory, to itself.
  explicit machine(int threads = 1, bool simulated = false) : threads_(threads), simulated_(simulated) {}

  /// Takes about a second. Called again, it keeps the higher bandwidths: disturbances only ever lower them.
  void measure(arithmetic a = arithmetic::of_float);
  /// One measurement of the peak: 5 ms. For between the operators.
  void sample_peak(arithmetic a = arithmetic::of_float);

  /// Fused multiply-adds of one thread alone, two operations each, per second: the median of the measurements so far. Of
  /// bf16 the products of pairs, summed in float; where the build has none, float's.
  double peak_flops(arithmetic a = arithmetic::of_float) const { return peak_quantile(0.5, a); }
  double peak_quantile(double share, arithmetic a = arithmetic::of_float) const;
  std::size_t peak_samples(arithmetic a = arithmetic::of_float) const { return peaks_[static_cast<int>(a)].size(); }
  /// Of all threads at once.
  double peak_of_all(arithmetic a = arithmetic::of_float) const;

  double read_bandwidth() const { return read_bandwidth_; }        // of one thread, bytes per second; sum of x
  double rewrite_bandwidth() const { return rewrite_bandwidth_; }  // x = a x in place: bytes read plus bytes written
  double read_bandwidth_of_all() const { return measures_all() ? all_read_bandwidth_ : read_bandwidth_; }
  double rewrite_bandwidth_of_all() const { return measures_all() ? all_rewrite_bandwidth_ : rewrite_bandwidth_; }

  int threads() const { return threads_; }
  /// Whether figures of all threads are measured beside those of one.
  bool measures_all() const { return threads_ > 1 && !simulated_; }

 private:
  int threads_;
  bool simulated_;
  std::vector<double> peaks_[3], all_peaks_[3];
  double read_bandwidth_ = 0, rewrite_bandwidth_ = 0, all_read_bandwidth_ = 0, all_rewrite_bandwidth_ = 0;
};

/// What a call costs beside its work: seconds of full_softmax for one token of one head of 16.
double small_call_seconds();

std::size_t last_level_cache_bytes();
std::size_t available_memory_bytes();
std::string processor_name();
/// That this process may use.
int processors();
/// What multiplies bf16 numbers: "vdpbf16ps", ...; "float" where the build has no products of them.
std::string bf16_arithmetic();
/// Whether there is a matrix unit that the operating system does not permit to use.
bool matrix_unit_is_refused();

}  // namespace bench
