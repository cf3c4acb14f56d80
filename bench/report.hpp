// attn_bench: the tables printed at the end.
#pragma once

#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "sweep.hpp"

namespace bench {

/// Prints nothing: repetitions run in random order; the tables at the end are in order.
struct silent_reporter final : benchmark::BenchmarkReporter {
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>&) override {}
};

/// The machine's peak and one line per operator and length.
std::string listing(const sweep&, const machine&, const flags&);

/// One line per operator: fitted exponent, time at 4096, of_peak, scratch, error, from which length it is faster than
/// full softmax; error and time of every setting; one line per backward pass.
std::string summary(sweep&, const machine&, const flags&);

}  // namespace bench
