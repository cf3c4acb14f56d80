#include "sweep.hpp"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <regex>

#include "terminal.hpp"

namespace bench {
namespace {

constexpr double long_run = 0.3;  // seconds

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// Google Benchmark's filter: a regular expression found anywhere in the name, negated by a leading '-'.
class name_filter {
 public:
  explicit name_filter(std::string text) : negated_(text.starts_with('-')) {
    if (negated_) text.erase(0, 1);
    if (!text.empty() && text != "all") pattern_ = std::regex(text);
  }
  bool keeps(const std::string& name) const { return std::regex_search(name, pattern_) != negated_; }

 private:
  bool negated_;
  std::regex pattern_{""};
};

std::vector<index> lengths_of(const variant& x, const flags& set) {
  std::vector<index> lengths;
  const index longest = set.max_length > 0 ? set.max_length : x.longest;
  for (index length = set.min_length; length <= longest; length *= 2) lengths.push_back(length);
  return lengths;
}

}  // namespace

double record::best() const { return *std::ranges::min_element(seconds); }

double record::median() const {
  std::vector<double> sorted = seconds;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::ranges::nth_element(sorted, middle);
  return *middle;
}

sweep::sweep(const flags& set, const machine& m, const std::vector<dataset>& data)
    : flags_(set), machine_(m), data_(data), variants_(make_variants(set)) {}

double sweep::probe(const variant& x) {
  const index length = std::min<index>(1024, x.longest);
  prepared_for_ = nullptr;
  prepared_ = x.prepare(length);
  attn::execution exec(static_cast<int>(flags_.threads));
  double best = 1e30;
  const double start = now();
  for (int run = 0; run < 3 || now() - start < 0.1; ++run) {
    const double begin = now();
    prepared_.run(exec);
    best = std::min(best, now() - begin);
    if (best > 0.5) break;
  }
  return best / x.flops(length);
}

void sweep::plan(const std::string& filter, bool list_only) {
  const name_filter wanted(filter);
  const double memory = 0.6 * static_cast<double>(available_memory_bytes());
  for (const variant& x : variants_) {
    const auto lengths = lengths_of(x, flags_);
    const auto is_wanted = [&](index length) { return wanted.keeps(x.name + "/" + std::to_string(length)); };
    if (std::ranges::none_of(lengths, is_wanted)) continue;
    try {
      const double seconds_per_flop = list_only ? 0 : probe(x);
      for (index length : lengths) {
        const double expected = seconds_per_flop * x.flops(length);
        const bool too_long = expected > flags_.max_seconds, too_large = x.memory_bytes(length) > memory;
        if (!list_only && (too_long || too_large)) {
          if (is_wanted(length))
            say("%s: stops before %td, where a run would take %s", x.name.c_str(), length,
                too_long ? time_text(expected).c_str() : memory_text(x.memory_bytes(length)).c_str());
          break;
        }
        if (is_wanted(length)) records_.push_back({&x, length, expected, {}, 0, {}});
      }
    } catch (const std::exception& error) {
      failures_.push_back(x.name + ": " + error.what());
    }
  }
  std::ranges::stable_sort(records_, {}, &record::length);
}

double sweep::pass_seconds(double min_seconds) const {
  constexpr double preparation = 0.1;
  double sum = 0;
  for (const record& r : records_) sum += preparation + std::max(1.5 * min_seconds, r.expected_seconds);
  return sum;
}

void sweep::enlist(int repetitions, double min_seconds) {
  all_seconds_ = repetitions * pass_seconds(min_seconds);
  for (const record& r : records_)
    if (r.expected_seconds > long_run) all_seconds_ += r.expected_seconds;
  started_ = now();
  for (record& r : records_)
    benchmark::RegisterBenchmark(r.name().c_str(), [this, &r](benchmark::State& state) {
      measure(state, r);
    })->Unit(benchmark::kMillisecond);
}

const record* sweep::find(const std::string& name) const {
  const auto found = std::ranges::find(records_, name, &record::name);
  return found == records_.end() ? nullptr : &*found;
}

const errors& sweep::errors_of(const variant& x) {
  const auto [entry, is_new] = errors_.try_emplace(x.name);
  if (is_new && x.approximates)
    for (const dataset& data : data_) {
      entry->second.operators.push_back(x.error(data));
      entry->second.mean_of_values.push_back(x.mean_error(data));
    }
  return entry->second;
}

void sweep::measure(benchmark::State& state, record& r) {
  show_progress(r);
  try {
    time(state, r);
  } catch (const std::exception& error) {
    r.failure = error.what();
    state.SkipWithError(error.what());
  }
}

void sweep::time(benchmark::State& state, record& r) {
  const errors& error = errors_of(*r.of);
  if (prepared_for_ != &r) {
    prepared_for_ = nullptr;
    prepared_ = {};  // before the next: both may be large
    prepared_ = r.of->prepare(r.length);
    prepared_for_ = &r;
  }
  if (r.expected_seconds < long_run) warm_.erase(r.name());
  const auto [exec, is_cold] = warm_.try_emplace(r.name(), static_cast<int>(flags_.threads));
  if (is_cold) {
    prepared_.run(exec->second);
    if (r.expected_seconds > long_run) done_seconds_ += r.expected_seconds;
  }

  std::vector<double> seconds;
  seconds.reserve(static_cast<std::size_t>(state.max_iterations));
  double before = now();
  const double begin = before;
  for (auto _ : state) {
    prepared_.run(exec->second);
    benchmark::DoNotOptimize(prepared_.out);
    benchmark::ClobberMemory();
    const double after = now();
    seconds.push_back(after - before);
    before = after;
  }
  const double mean = (before - begin) / static_cast<double>(seconds.size());
  r.seconds.insert(r.seconds.end(), seconds.begin(), seconds.end());
  r.scratch_bytes = exec->second.scratch_bytes();
  done_seconds_ += before - begin;

  state.SetLabel(r.of->label);
  const double flops = r.of->flops(r.length) / mean;
  state.counters["flops"] = flops;
  state.counters["of_peak"] = flops / (machine_.peak_flops * static_cast<double>(flags_.threads));
  state.counters["best_ms"] = 1e3 * *std::ranges::min_element(seconds);
  state.counters["scratch_bytes"] = static_cast<double>(r.scratch_bytes);
  if (const auto moved = traffic_of(*r.of, r.length, mean, machine_)) {
    state.counters["moved_bytes_per_second"] = moved->bytes_per_second;
    state.counters["of_bandwidth"] = moved->share;
  }
  for (std::size_t i = 0; i < error.operators.size(); ++i) {
    const std::string suffix = i == 0 ? std::string() : '_' + std::to_string(i);
    state.counters["rel_error" + suffix] = error.operators[i];
    state.counters["mean_error" + suffix] = error.mean_of_values[i];
  }
  if (r.expected_seconds < long_run) warm_.erase(r.name());
}

void sweep::show_progress(const record& r) {
  const double share = std::min(done_seconds_ / all_seconds_, 0.99), t = now();
  const double left = share > 0.02 ? (t - started_) * (1 - share) / share : all_seconds_ - done_seconds_;
  if (!is_terminal() && t - shown_ < 10) return;
  shown_ = t;
  show_status("%3.0f %%, %3.0f s left: %s", 100 * share, left, r.name().c_str());
}

std::vector<std::string> sweep::complaints() {
  std::vector<std::string> all = failures_;
  for (const record& r : records_)
    if (!r.failure.empty()) all.push_back(r.name() + ": " + r.failure);
  constexpr double rounding = 2e-6;
  for (const auto& [name, error] : errors_) {
    const auto x = std::ranges::find(variants_, name, &variant::name);
    for (double e : error.operators)
      if (x->exact && !(e <= rounding))
        all.push_back(name + ": expected rel_error <= 2e-6; found " + std::to_string(e));
  }
  return all;
}

}  // namespace bench
