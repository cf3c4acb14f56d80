// attn_bench: the line for every benchmark, and the table at the end.
#pragma once

#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "sweep.hpp"

namespace bench {

/// Shows one line a benchmark. All figures come from the sweep's records; Google Benchmark only says when.
class line_reporter : public benchmark::BenchmarkReporter {
 public:
  line_reporter(const sweep& s, const machine& m, const flags& f) : sweep_(s), machine_(m), flags_(f) {}
  bool ReportContext(const Context&) override;
  void ReportRuns(const std::vector<Run>& runs) override;

 private:
  const sweep& sweep_;
  machine machine_;
  const flags& flags_;
};

/// Operator, fitted exponent, time at 4096, of_peak, scratch, error, and from where it beats full softmax.
std::string summary(sweep&, const machine&, const flags&);

}  // namespace bench
