#include "sweep.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <numeric>
#include <regex>
#include <stdexcept>

#include "inputs.hpp"
#include "processes.hpp"
#include "save.hpp"
#include "terminal.hpp"
#include "virtual_threads.hpp"

namespace bench {
namespace {

constexpr double long_run = 1;  // seconds: it is timed at once, without a run before that warms up

/// Google Benchmark's filter: a regular expression found anywhere in the name, negated by a leading '-'.
class name_filter {
 public:
  explicit name_filter(std::string text) : negated_(text.starts_with('-')) {
    if (negated_) text.erase(0, 1);
    if (text.empty() || text == "all") return;
    try {
      pattern_ = std::regex(text);
    } catch (const std::regex_error& error) {
      throw std::invalid_argument("attn_bench: --benchmark_filter expects a regular expression; found \"" + text +
                                  "\" (" + error.what() + ")");
    }
  }
  bool keeps(const std::string& name) const { return std::regex_search(name, pattern_) != negated_; }

 private:
  bool negated_;
  std::regex pattern_{""};
};

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

/// Keeps what Google Benchmark reports: the file is written at the end, when it is known what was not run.
struct collector final : benchmark::BenchmarkReporter {
  std::vector<Run>& runs;
  explicit collector(std::vector<Run>& to) : runs(to) {}
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>& more) override {
    for (Run run : more) {
      run.run_name.time_type.clear();  // "manual_time", which would be a part of the name
      runs.push_back(std::move(run));
    }
  }
};

}  // namespace

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double record::best() const { return *std::ranges::min_element(seconds); }
double record::median() const { return median_of(seconds); }

sweep::sweep(const flags& set, machine& m, const std::vector<dataset>& data)
    : flags_(set), machine_(m), data_(data), variants_(make_variants(set)) {}

void sweep::plan(const sweep_request& asked) {
  asked_ = asked;
  memory_ = 0.6 * static_cast<double>(available_memory_bytes());
  const name_filter wanted(asked.filter);
  bool any = false;
  for (const variant& x : variants_)
    for (const idx_t length : lengths_of(x, flags_)) {
      any = true;
      if (wanted.keeps(x.name + "/" + std::to_string(length)))
        records_.push_back({.of = &x, .length = length, .worth = tier_of(x, length, flags_)});
    }
  if (!any)
    throw std::invalid_argument("attn_bench: expected a length from --min-length to --max-length; found none");
  if (records_.empty())
    throw std::invalid_argument("attn_bench: --benchmark_filter expects a part of a name, as ^nystrom; found \"" +
                                asked.filter + "\", which no name has (--benchmark_list_tests lists all)");
  std::ranges::stable_sort(records_, [](const record& a, const record& b) {
    return std::pair(a.worth, a.length) < std::pair(b.worth, b.length);
  });
  if (!asked.list_only) return;
  for (const record& r : records_) benchmark::RegisterBenchmark(r.name().c_str(), [](benchmark::State&) {});
  benchmark::RunSpecifiedBenchmarks();
}

double sweep::time_left() const {
  return asked_.budgeted ? asked_.started + flags_.budget - closing_seconds_ - seconds_now() : 1e30;
}

/// Of one run: its own time if it was run before, or by its operations at the pace of what is nearest, or at a tenth of
/// the machine's peak.
double sweep::expected_seconds(const record& r) const {
  if (r.measured()) return r.run_seconds;
  const record* nearest = nearest_measured(r);
  const double operations = r.of->flops(r.length);
  if (!nearest) return operations / (0.1 * machine_.peak_flops());
  return nearest->run_seconds * operations / nearest->of->flops(nearest->length);
}

/// The nearest length of the same operator, or of its usual setting, or of its rival (of a backward pass the forward
/// one).
const record* sweep::nearest_measured(const record& r) const {
  const record* nearest = nullptr;
  for (const std::string* name : {&r.of->name, &r.of->form, &r.of->rival}) {
    for (const record& other : records_)
      if (other.measured() && other.of->name == *name &&
          (!nearest || std::abs(other.length - r.length) < std::abs(nearest->length - r.length)))
        nearest = &other;
    if (nearest) break;
  }
  return nearest;
}

double sweep::preparation_seconds(const record& r) const {
  const double bytes = r.of->memory_bytes(r.length);
  const auto [seconds, drawn] = memory_so_far();
  // Views of what is drawn already cost nothing.
  double expected = bytes > drawn_bytes_ && drawn > 0 ? seconds / drawn * bytes : 0;
  const record* nearest = nullptr;
  for (const record& other : records_)
    if (other.of == r.of && other.measured() && (!nearest || other.length > nearest->length) &&
        other.length <= r.length)
      nearest = &other;
  if (nearest) expected += nearest->preparation_seconds * bytes / nearest->of->memory_bytes(nearest->length);
  return expected;
}

double sweep::visit_seconds(const record& r) const {
  constexpr double overhead = 0.01;
  const double one_run = expected_seconds(r), warm_up = one_run > long_run ? 0 : one_run;
  const double beside = wants_efficiency(r) ? static_cast<double>(flags_.threads) * 3 * one_run : 0;
  return overhead + preparation_seconds(r) + warm_up + std::max(1.1 * asked_.min_seconds, one_run) + beside;
}

void sweep::run(double closing_seconds) {
  closing_seconds_ = closing_seconds;
  order<sweep>(*this).run();
}

void sweep::announce(const std::vector<record*>& rest) {
  double seconds = 0;
  for (const record* r : rest)
    if (beyond_limits(*r) == omission::none) seconds += visit_seconds(*r);
  say("The rest of the main curve, from %td tokens, takes about %.0f s", rest[0]->length, seconds);
  if (seconds > time_left())
    say("That is more than the %.0f s left of the budget of %.0f s: it is run all the same", std::max(0.0, time_left()),
        flags_.budget);
}

omission sweep::beyond_limits(const record& r) const {
  if (r.of->memory_bytes(r.length) > memory_) return omission::memory;
  if (flags_.max_seconds > 0 && nearest_measured(r) && expected_seconds(r) > flags_.max_seconds)
    return omission::seconds;
  return omission::none;
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

void sweep::visit(record& r, const char* what) {
  show_progress(r, what);
  benchmark::ClearRegisteredBenchmarks();
  auto* const registered = benchmark::RegisterBenchmark(
      r.name().c_str(), [this, &r](benchmark::State& state) { measure(state, r); });
  registered->Unit(benchmark::kMillisecond);
  if (flags_.virtual_threads > 0) registered->UseManualTime();
  const std::size_t before = results_.size();
  collector reporter(results_);
  benchmark::RunSpecifiedBenchmarks(&reporter, "all");  // it is one of those that the filter keeps
  if (r.measured() && r.failure.empty() && wants_efficiency(r)) measure_efficiency(r);
  for (std::size_t n = before; r.efficiency > 0 && n < results_.size(); ++n)
    results_[n].counters["efficiency"] = r.efficiency;
  if (asked_.most_visits > 1)
    for (std::size_t n = before; n < results_.size(); ++n) results_[n].repetition_index = r.visits;
  ++r.visits;
  machine_.sample_peak(r.of->products);
}

void sweep::measure(benchmark::State& state, record& r) {
  try {
    time(state, r);
  } catch (const std::exception& error) {
    r.failure = error.what();
    state.SkipWithError(error.what());
  }
}

void sweep::time(benchmark::State& state, record& r) {
  const double begin = seconds_now();
  const double drawing = memory_so_far().seconds;
  const workload prepared = r.of->prepare(r.length);
  r.preparation_seconds = seconds_now() - begin - (memory_so_far().seconds - drawing);
  drawn_bytes_ = std::max(drawn_bytes_, r.of->memory_bytes(r.length));
  const auto threads = static_cast<int>(flags_.threads);
  const bool is_virtual = flags_.virtual_threads > 0;
  virtual_threads simulated;
  attn::execution exec = is_virtual ? simulated.make_execution(threads) : attn::execution(threads);
  double real = 0;  // of the last run
  const auto run = [&] {
    const double saved = simulated.saved(), start = seconds_now();
    prepared(exec);
    real = seconds_now() - start;
    r.run_seconds = std::min(r.run_seconds, real);
    return real - (simulated.saved() - saved);
  };
  const double expected = expected_seconds(r);
  double one_run = expected;
  const bool warmed_up = expected <= long_run;
  double warm_up = 0;
  if (warmed_up) warm_up = run(), one_run = real;
  if (one_run < 0.1) warm_up = std::min(warm_up, run()), one_run = std::min(one_run, real);

  // Google Benchmark first asks for a single iteration and then guesses; a batch of the right size is done at once. It
  // wants as many in every repetition.
  if (r.batch == 0)
    r.batch = static_cast<std::ptrdiff_t>(std::clamp(1.05 * asked_.min_seconds / std::max(one_run, 1e-9), 1.0, 1e6));
  std::vector<double> seconds;
  seconds.reserve(static_cast<std::size_t>(r.batch));
  while (state.KeepRunningBatch(r.batch))
    for (std::ptrdiff_t n = 0; n < r.batch; ++n) {
      seconds.push_back(run());
      if (is_virtual) state.SetIterationTime(seconds.back());
    }
  // What warmed up took as long as it takes, where it is no less long than what is timed: then it is a second run.
  if (warmed_up && r.batch == 1) seconds.push_back(warm_up);
  r.seconds.insert(r.seconds.end(), seconds.begin(), seconds.end());
  r.scratch_bytes = exec.scratch_bytes();
  count(state, r, seconds);
  if (!flags_.save.empty()) save(flags_.save, flags_, *r.of, r.length);
}

void sweep::count(benchmark::State& state, const record& r, const std::vector<double>& seconds) {
  const double mean = std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(seconds.size());
  state.SetLabel(r.of->label);
  const double flops = r.of->flops(r.length) / mean;
  state.counters["flops"] = flops;
  // The medians up to now: those of the last row count.
  state.counters["peak_flops"] = machine_.peak_flops(r.of->products);
  state.counters["of_peak"] = flops / machine_.peak_of_all(r.of->products);
  state.counters["runs"] = static_cast<double>(seconds.size());
  state.counters["best_ms"] = 1e3 * *std::ranges::min_element(seconds);
  state.counters["sequences"] = static_cast<double>(r.of->sequences);
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
  if (r.of->sees_every_token(error.operators)) state.counters["sees_every_token"] = 1;
}

/// Once for every operator, at one length.
bool sweep::wants_efficiency(const record& r) const {
  return flags_.efficiency && machine_.measures_all() && r.efficiency == 0 && !r.of->has_setting() &&
         r.length == compared_length(lengths_of(*r.of, flags_), flags_) &&
         static_cast<double>(flags_.threads) * r.of->memory_bytes(r.length) <= memory_;
}

void sweep::measure_efficiency(record& r) {
  show_progress(r, "beside processes");
  const double calls = calls_per_second(static_cast<int>(flags_.threads), r.of->prepare(r.length), asked_.min_seconds);
  if (calls > 0) r.efficiency = 1 / (r.median() * calls);
}

void sweep::show_progress(const record& r, const char* what) {
  const double t = seconds_now();
  if (!is_terminal() && t - shown_ < 10) return;
  shown_ = t;
  const double left = time_left();
  if (left < 0 || left > 1e9)
    show_status("%s: %s", what, r.name().c_str());
  else
    show_status("%s, at most %.0f s left: %s", what, left, r.name().c_str());
}

std::vector<std::pair<std::string, idx_t>> sweep::omitted(omission reason) const {
  std::vector<std::pair<std::string, idx_t>> names;
  std::vector<const record*> left_out;
  for (const record& r : records_)
    if (r.omitted == reason) left_out.push_back(&r);
  // In the order of the table of operators.
  std::ranges::sort(left_out, {}, [](const record* r) { return std::pair(r->of, r->length); });
  for (const record* r : left_out) names.emplace_back(r->of->name, r->length);
  return names;
}

std::vector<std::string> sweep::complaints() {
  std::vector<std::string> all;
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
