// attn_bench: runs the plan, most worthwhile first, as far as the time allows, and keeps what was found.
#pragma once

#include <benchmark/benchmark.h>

#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "accuracy.hpp"
#include "machine.hpp"
#include "plan.hpp"
#include "variant.hpp"

namespace bench {

struct record {
  const variant* of;
  idx_t length;
  tier worth;
  std::vector<double> seconds{};   // of every run that was timed
  double run_seconds = 1e30;       // of the fastest; with virtual threads as it really was
  double preparation_seconds = 0;  // of the last visit: parameters made, caches filled; not numbers drawn once for all
  std::size_t scratch_bytes = 0;
  double efficiency = 0;     // calls of all threads over those of as many processes; 0: not measured
  std::ptrdiff_t batch = 0;  // runs of a visit
  int visits = 0;
  std::string failure{};
  omission omitted = omission::none;

  std::string name() const { return of->name + "/" + std::to_string(length); }
  bool measured() const { return !seconds.empty(); }
  double best() const;
  double median() const;
};

struct errors {
  std::vector<double> operators, mean_of_values;  // one per dataset; none where the error has no meaning
};

/// What the user asks of a sweep besides the flags of attn_bench.
struct sweep_request {
  std::string filter;          // only names Google Benchmark's filter would keep
  double min_seconds = 0;      // how long a visit times an operator, at least
  bool list_only = false;      // nothing is run
  int most_visits = 5;         // of every row; 1 where Google Benchmark repeats
  bool budgeted = true;        // is there an end?
  double started = 0;          // when the budget began, by seconds_now()
};
double seconds_now();

class sweep {
 public:
  sweep(const flags&, machine&, const std::vector<dataset>&);

  /// Throws std::invalid_argument where nothing is left to run.
  void plan(const sweep_request&);
  /// In the order of order.hpp. `closing_seconds`: what comes after it takes so long.
  void run(double closing_seconds);
  /// Google Benchmark's results, of all visits.
  const std::vector<benchmark::BenchmarkReporter::Run>& results() const { return results_; }

  const std::deque<record>& records() const { return records_; }
  const std::vector<variant>& variants() const { return variants_; }
  const std::vector<dataset>& data() const { return data_; }
  const record* find(const std::string& name) const;
  const errors& errors_of(const variant&);
  /// What was not run for this reason, by name.
  std::vector<std::pair<std::string, idx_t>> omitted(omission) const;
  /// Operators that threw, and exact ones whose error is more than rounding.
  std::vector<std::string> complaints();

 private:
  friend order<sweep>;

  std::deque<record>& rows() { return records_; }
  int most_visits() const { return asked_.most_visits; }
  double time_left() const;
  const record* nearest_measured(const record&) const;
  double expected_seconds(const record&) const;
  double preparation_seconds(const record&) const;
  double visit_seconds(const record&) const;
  void announce(const std::vector<record*>& rest);
  omission beyond_limits(const record&) const;
  void visit(record&, const char* what);
  void measure(benchmark::State&, record&);
  void time(benchmark::State&, record&);
  void count(benchmark::State&, const record&, const std::vector<double>& seconds);
  bool wants_efficiency(const record&) const;
  void measure_efficiency(record&);
  void show_progress(const record&, const char* what);

  const flags& flags_;
  machine& machine_;
  const std::vector<dataset>& data_;
  std::vector<variant> variants_;
  std::deque<record> records_;
  std::vector<benchmark::BenchmarkReporter::Run> results_;
  std::map<std::string, errors> errors_;
  sweep_request asked_;
  double closing_seconds_ = 0;
  double memory_ = 0;       // bytes a run may take
  double drawn_bytes_ = 0;  // of the largest run so far: what it viewed is drawn
  double shown_ = 0;
};

}  // namespace bench
