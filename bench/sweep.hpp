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
  double expected_seconds;      // of one run, foretold from a shorter length
  std::vector<double> seconds;  // of every run that was timed
  std::size_t scratch_bytes = 0;
  std::string failure;

  std::string name() const { return of->name + "/" + std::to_string(length); }
  double best() const;
  double median() const;
};

struct errors {
  std::vector<double> operators, mean_of_values;  // one a dataset; none where the distance says nothing
};

class sweep {
 public:
  sweep(const flags&, const machine&, const std::vector<dataset>&);

  /// Chooses the lengths: times each operator once at a short length and foretells the rest. Only names that Google
  /// Benchmark's `filter` would keep are looked at. With `list_only` nothing is run and nothing left out.
  void plan(const std::string& filter, bool list_only);
  /// Hands every planned run to Google Benchmark, shortest lengths first.
  void enlist(int repetitions, double min_seconds);
  /// What one pass over the plan will take.
  double pass_seconds(double min_seconds) const;

  const std::deque<record>& records() const { return records_; }
  const record* find(const std::string& name) const;
  const errors& errors_of(const variant&);
  /// Operators that threw, and exact ones whose error is more than rounding.
  std::vector<std::string> complaints();

 private:
  double probe(const variant&);
  void measure(benchmark::State&, record&);
  void time(benchmark::State&, record&);
  void show_progress(const record&);

  const flags& flags_;
  machine machine_;
  const std::vector<dataset>& data_;
  std::vector<variant> variants_;
  std::deque<record> records_;
  std::vector<std::string> failures_;
  std::map<std::string, errors> errors_;
  std::map<std::string, attn::execution> warm_;  // of long runs, so that they are warmed up once
  const record* prepared_for_ = nullptr;
  workload prepared_;
  double all_seconds_ = 0, done_seconds_ = 0, started_ = 0, shown_ = 0;
};

}  // namespace bench
