// attn_bench: what is told when all has been measured.
#pragma once

#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "sweep.hpp"

namespace bench {

/// Says nothing: repetitions come in random order, so that everything is told in order at the end.
struct silent_reporter final : benchmark::BenchmarkReporter {
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>&) override {}
};

/// One line a benchmark.
std::string listing(const sweep&, const machine&, const flags&);

/// Operator, fitted exponent, time at 4096, of_peak, scratch, error, and from where it beats full softmax.
std::string summary(sweep&, const machine&, const flags&);

}  // namespace bench
