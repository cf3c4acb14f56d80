// attn_bench: which operator is run at which lengths, and what was found.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "accuracy.hpp"
#include "machine.hpp"
#include "variant.hpp"

namespace benchmark {
class State;
}

namespace bench {

struct record {
  const variant* of;
  index length;
  double expected_seconds;      // of one run, extrapolated from a shorter length
  double preparation_seconds;   // likewise: what comes before, such as drawing parameters and filling caches
  std::vector<double> seconds;  // of every run that was timed
  std::size_t scratch_bytes = 0;
  std::string failure;
  std::ptrdiff_t batch = 0;  // runs of a repetition

  std::string name() const { return of->name + "/" + std::to_string(length); }
  double best() const;
  double median() const;
};

struct errors {
  std::vector<double> operators, mean_of_values;  // one per dataset; none where the error has no meaning
};

class sweep {
 public:
  sweep(const flags&, machine&, const std::vector<dataset>&);

  /// Chooses the lengths: times each operator once at a short length and extrapolates. Only names Google Benchmark's
  /// `filter` would keep are looked at. With `list_only` nothing is run and nothing left out.
  void plan(const std::string& filter, double min_seconds, bool list_only);
  /// Registers every planned run with Google Benchmark, shortest lengths first.
  void enlist(int repetitions);
  /// What so many repetitions of the plan take, roughly.
  double expected_seconds(int repetitions) const;

  const std::deque<record>& records() const { return records_; }
  const std::vector<dataset>& data() const { return data_; }
  const record* find(const std::string& name) const;
  const errors& errors_of(const variant&);
  /// Operators that threw, and exact ones whose error is more than rounding.
  std::vector<std::string> complaints();

 private:
  struct pace {
    double seconds_per_flop, preparation_seconds_per_byte;
  };
  pace probe(const variant&);
  void fit_budget();
  double visit_seconds(const record&) const;
  void measure(benchmark::State&, record&);
  void time(benchmark::State&, record&);
  void show_progress(const record&);

  const flags& flags_;
  machine& machine_;
  const std::vector<dataset>& data_;
  std::vector<variant> variants_;
  std::deque<record> records_;
  std::vector<std::string> failures_;
  std::map<std::string, errors> errors_;
  std::map<std::string, attn::execution> warm_;  // of long runs, so that they are warmed up once
  const record* prepared_for_ = nullptr;
  workload prepared_;
  double min_seconds_ = 0;
  double all_seconds_ = 0, done_seconds_ = 0, started_ = 0, shown_ = 0;
};

}  // namespace bench
