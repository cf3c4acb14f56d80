#include "sweep.hpp"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <numeric>
#include <regex>

#include "terminal.hpp"

namespace bench {
namespace {

constexpr double long_run = 0.3;  // seconds
constexpr double default_max_seconds = 0.7;

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

/// Doubled up to 16384, where operators overtake each other; fewer beyond, where curves are straight. Of backward
/// passes the powers of 4 that are among them: they follow the forward curves. Of a setting that is not the flags',
/// one.
std::vector<index> lengths_of(const variant& x, const flags& set) {
  std::vector<index> lengths;
  const index longest = set.max_length > 0 ? set.max_length : x.longest;
  for (index length = set.min_length; length <= longest; length *= length < 16384 ? 2 : 4) lengths.push_back(length);
  const auto power_of_4 = [](index n) {
    const auto bits = static_cast<std::size_t>(n);
    return std::has_single_bit(bits) && std::countr_zero(bits) % 2 == 0;
  };
  if (x.backward && std::ranges::any_of(lengths, power_of_4))
    std::erase_if(lengths, [&](index n) { return !power_of_4(n); });
  if (x.has_setting() && !lengths.empty())
    lengths = {std::ranges::count(lengths, usual_length) > 0 ? usual_length : lengths.back()};
  return lengths;
}

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

}  // namespace

double record::best() const { return *std::ranges::min_element(seconds); }

double record::median() const { return median_of(seconds); }

sweep::sweep(const flags& set, machine& m, const std::vector<dataset>& data)
    : flags_(set), machine_(m), data_(data), variants_(make_variants(set)) {}

sweep::pace sweep::probe(const variant& x) {
  const index length = std::min<index>(flags_.smoke ? 256 : 1024, x.longest);
  const double start = now();
  prepared_for_ = nullptr;
  prepared_ = x.prepare(length);
  const double prepared = now();
  attn::execution exec(static_cast<int>(flags_.threads));
  double best = 1e30;
  for (int run = 0; run < 2 || (!flags_.smoke && now() - prepared < 0.05); ++run) {
    const double begin = now();
    prepared_(exec);
    best = std::min(best, now() - begin);
    if (best > 0.5) break;
  }
  return {best / x.flops(length), (prepared - start) / x.memory_bytes(length)};
}

void sweep::plan(const std::string& filter, double min_seconds, bool list_only) {
  const name_filter wanted(filter);
  const double memory = 0.6 * static_cast<double>(available_memory_bytes());
  const double most_seconds = flags_.max_seconds > 0 ? flags_.max_seconds : default_max_seconds;
  bool too_long = false, too_large = false;
  min_seconds_ = min_seconds;
  for (const variant& x : variants_) {
    const auto lengths = lengths_of(x, flags_);
    const auto is_wanted = [&](index length) { return wanted.keeps(x.name + "/" + std::to_string(length)); };
    if (std::ranges::none_of(lengths, is_wanted)) continue;
    try {
      pace rate{};
      if (!list_only) {
        if (is_terminal() || &x == &variants_[0]) show_status("preparing %s", x.name.c_str());
        rate = probe(x);
        errors_of(x);
      }
      for (index length : lengths) {
        const double expected = rate.seconds_per_flop * x.flops(length);
        if (!list_only && (expected > most_seconds || x.memory_bytes(length) > memory)) {
          (expected > most_seconds ? too_long : too_large) = true;
          break;
        }
        if (is_wanted(length))
          records_.push_back(
              {&x, length, expected, rate.preparation_seconds_per_byte * x.memory_bytes(length), {}, 0, {}, 0});
      }
    } catch (const std::exception& error) {
      failures_.push_back(x.name + ": " + error.what());
    }
  }
  std::ranges::stable_sort(records_, {}, &record::length);
  if (too_long)
    say("Left out: lengths at which one run takes more than %s (--max-seconds)", time_text(most_seconds).c_str());
  if (too_large) say("Left out: lengths that need more than 60 %% of the available memory");
  if (flags_.max_seconds == 0) fit_budget();
}

/// Leaves out the longest runs until the sweep fits.
void sweep::fit_budget() {
  std::size_t left_out = 0;
  while (!records_.empty() && expected_seconds(1) > flags_.budget) {
    records_.erase(std::ranges::max_element(records_, {}, &record::expected_seconds));
    ++left_out;
  }
  if (left_out > 0)
    say("Left out: the %zu longest runs, so that the sweep takes %.0f s (--budget, --max-seconds)", left_out,
        flags_.budget);
}

/// One repetition of one record.
double sweep::visit_seconds(const record& r) const {
  constexpr double overhead = 0.02;
  const double warm_up = r.expected_seconds > long_run ? 0 : 2 * r.expected_seconds;
  return overhead + r.preparation_seconds + warm_up + std::max(1.1 * min_seconds_, r.expected_seconds);
}

double sweep::expected_seconds(int repetitions) const {
  double sum = 0;
  for (const record& r : records_)
    sum += repetitions * visit_seconds(r) + (r.expected_seconds > long_run ? r.expected_seconds : 0);
  return sum;
}

void sweep::enlist(int repetitions) {
  all_seconds_ = expected_seconds(repetitions);
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
  machine_.sample_peak(r.of->products);
  done_seconds_ += visit_seconds(r);
}

void sweep::time(benchmark::State& state, record& r) {
  const bool is_long = r.expected_seconds > long_run;
  if (prepared_for_ != &r) {
    prepared_for_ = nullptr;
    prepared_ = {};  // before the next: both may be large
    prepared_ = r.of->prepare(r.length);
    prepared_for_ = &r;
  }
  const auto run = [&](attn::execution& exec) {
    const double begin = now();
    prepared_(exec);
    return now() - begin;
  };
  if (!is_long) warm_.erase(r.name());
  const auto [entry, is_cold] = warm_.try_emplace(r.name(), static_cast<int>(flags_.threads));
  attn::execution& exec = entry->second;
  double one_run = r.expected_seconds;
  if (is_cold) {
    one_run = run(exec);
    if (is_long) done_seconds_ += r.expected_seconds;
  }
  if (!is_long) one_run = std::min(one_run, run(exec));

  // Google Benchmark first asks for a single iteration and then guesses; a batch of the right size is done at once. It
  // wants as many in every repetition.
  if (r.batch == 0)
    r.batch = static_cast<std::ptrdiff_t>(std::clamp(1.05 * min_seconds_ / std::max(one_run, 1e-9), 1.0, 1e6));
  std::vector<double> seconds;
  seconds.reserve(static_cast<std::size_t>(r.batch));
  while (state.KeepRunningBatch(r.batch))
    for (std::ptrdiff_t n = 0; n < r.batch; ++n) seconds.push_back(run(exec));
  const double mean = std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(seconds.size());
  r.seconds.insert(r.seconds.end(), seconds.begin(), seconds.end());
  r.scratch_bytes = exec.scratch_bytes();

  state.SetLabel(r.of->label);
  const double flops = r.of->flops(r.length) / mean;
  state.counters["flops"] = flops;
  const double peak = machine_.peak_flops(r.of->products);  // the median up to now: that of the last row counts
  state.counters["peak_flops"] = peak;
  state.counters["of_peak"] = flops / (peak * static_cast<double>(flags_.threads));
  state.counters["best_ms"] = 1e3 * *std::ranges::min_element(seconds);
  state.counters["scratch_bytes"] = static_cast<double>(r.scratch_bytes);
  if (const auto moved = traffic_of(*r.of, r.length, median_of(seconds), machine_)) {
    state.counters["moved_bytes_per_second"] = moved->bytes_per_second;
    state.counters["of_bandwidth"] = moved->share;
  }
  const errors& error = errors_of(*r.of);
  for (std::size_t i = 0; i < error.operators.size(); ++i) {
    const std::string suffix = i == 0 ? std::string() : '_' + std::to_string(i);
    state.counters["rel_error" + suffix] = error.operators[i];
    state.counters["mean_error" + suffix] = error.mean_of_values[i];
  }
  if (!is_long) warm_.erase(r.name());
}

/// The plan's estimate, corrected by how fast the runs so far went; a fifth of the plan's weight stays with the plan.
void sweep::show_progress(const record& r) {
  const double t = now(), prior = 0.2 * all_seconds_;
  if (!is_terminal() && t - shown_ < 10) return;
  shown_ = t;
  const double speed = (t - started_ + prior) / (done_seconds_ + prior);
  show_status("%3.0f %%, %3.0f s left: %s", std::min(99.0, 100 * done_seconds_ / all_seconds_),
              std::max(0.0, all_seconds_ - done_seconds_) * speed, r.name().c_str());
}

std::vector<std::string> sweep::complaints() {
  std::vector<std::string> all = failures_;
  for (const record& r : records_)
    if (!r.failure.empty()) all.push_back(r.name() + ": " + r.failure);
  for (const auto& [name, error] : errors_) {
    const auto x = std::ranges::find(variants_, name, &variant::name);
    for (double e : error.operators)
      if (x->exact && !(e <= x->rounding)) {
        char line[160];
        std::snprintf(line, sizeof line, ": expected rel_error <= %.1e; found %.3e", x->rounding, e);
        all.push_back(name + line);
      }
  }
  return all;
}

}  // namespace bench
