// attn_bench: complexity curves of attention operators, on this machine and on real data.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "report.hpp"
#include "sweep.hpp"
#include "terminal.hpp"

namespace bench {
namespace {

constexpr int most_repetitions = 5;

/// Lets Google Benchmark take its flags out of `arguments`; what is left it does not know. It keeps a pointer to the
/// program's name, so the texts must stay.
std::vector<std::string> initialize(std::vector<std::string>& arguments) {
  std::vector<char*> argv;
  for (std::string& a : arguments) argv.push_back(a.data());
  argv.push_back(nullptr);
  int argc = static_cast<int>(arguments.size());
  benchmark::Initialize(&argc, argv.data());
  return {argv.begin() + 1, argv.begin() + argc};
}

std::vector<dataset> read_data(const flags& set) {
  std::vector<dataset> data;
  if (!set.input.empty()) {
    data.emplace_back(set.input);
    return data;
  }
  const std::string folder = ATTN_BENCH_DATA;
  const double mean_error[] = {0.62, 0.27};  // of answering with the plain mean of the values
  for (int layer = 0; layer < 2; ++layer) {
    data.emplace_back(folder + "/use_lite_layer" + std::to_string(layer));
    const double found = data.back().mean_error({});
    if (!(std::abs(found - mean_error[layer]) < 0.005))
      throw std::runtime_error("attn_bench: " + folder +
                               " is not the data this was written for: expected an error of " +
                               std::to_string(mean_error[layer]) + " for the mean of the values of layer " +
                               std::to_string(layer) + "; found " + std::to_string(found));
  }
  return data;
}

std::string figure(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

void add_context(const flags& set, const machine& m, const std::vector<dataset>& data) {
  const auto add = [](const char* key, const std::string& value) { benchmark::AddCustomContext(key, value); };
  add("processor", processor_name());
  add("compiler", ATTN_BENCH_COMPILER);
  add("simd", Eigen::SimdInstructionSetsInUse());
  add("read_gb_per_s", figure(m.read_bandwidth() * 1e-9));
  add("rewrite_gb_per_s", figure(m.rewrite_bandwidth() * 1e-9));
  add("heads", std::to_string(set.heads));
  add("dim", std::to_string(set.dim));
  add("threads", std::to_string(set.threads));
  add("type", set.type);
  add("precision", set.precision);
  add("bf16_arithmetic", bf16_arithmetic());
  add("window", std::to_string(set.window));
  add("rank", std::to_string(set.rank));
  add("landmarks", std::to_string(set.landmarks));
  std::string names;
  for (const dataset& d : data) names += (names.empty() ? "" : ", ") + d.name();
  add("error_data", names);
  add("error_tokens", std::to_string(data[0].length()));
}

/// How long each operator is timed in each repetition, at least.
double min_seconds_of(const flags& set, const std::vector<std::string>& given) {
  const double otherwise = set.smoke ? 0.01 : 0.05;
  const double wanted = std::atof(value_of(given, "benchmark_min_time", "0").c_str());
  return wanted > 0 ? wanted : otherwise;
}

/// As many repetitions as fit the budget, unless the user says how many.
int repetitions_of(const sweep& s, const flags& set, const std::vector<std::string>& given) {
  if (is_given(given, "benchmark_repetitions"))
    return std::max(1, std::atoi(value_of(given, "benchmark_repetitions", "1").c_str()));
  int repetitions = 1;
  while (!set.smoke && repetitions < most_repetitions && s.expected_seconds(repetitions + 1) <= set.budget)
    ++repetitions;
  return repetitions;
}

/// Flags of Google Benchmark that the user did not give.
std::vector<std::string> default_flags(const std::vector<std::string>& given, int repetitions) {
  std::vector<std::string> defaults = {given[0]};
  // The sweep decides itself how often it runs; any time is enough.
  if (!is_given(given, "benchmark_min_time")) defaults.push_back("--benchmark_min_time=0.000001" ATTN_BENCH_SECONDS);
  if (!is_given(given, "benchmark_repetitions"))
    defaults.push_back("--benchmark_repetitions=" + std::to_string(repetitions));
  // Repetitions far apart in time: a disturbance of a few seconds then affects one of them, not all.
  if (repetitions > 1 && !is_given(given, "benchmark_enable_random_interleaving"))
    defaults.push_back("--benchmark_enable_random_interleaving=true");
  return defaults;
}

int run(std::vector<std::string> arguments) {
  flags set = take_flags(arguments);
  if (set.help) {
    std::fputs(flags_help().c_str(), stdout);
    std::fflush(stdout);
    arguments.push_back("--help");
  }
  if (set.smoke && set.max_length == 0) set.max_length = 512;
  const auto unknown = initialize(arguments);
  if (!unknown.empty()) {
    for (const std::string& flag : unknown) say("attn_bench: unknown argument %s (--help lists all)", flag.c_str());
    return 1;
  }
  const bool list_only = value_of(arguments, "benchmark_list_tests",
                                  is_given(arguments, "benchmark_list_tests") ? "true" : "false") != "false";
  const std::string format = value_of(arguments, "benchmark_format", "console");
  const std::string filter = value_of(arguments, "benchmark_filter", "");

  const auto data = read_data(set);
  machine m;
  if (!list_only) {
    show_status("measuring this machine");
    m.measure();
    add_context(set, m, data);
    say("%s, %s, %s", processor_name().c_str(), ATTN_BENCH_COMPILER, Eigen::SimdInstructionSetsInUse());
  }
  sweep s(set, m, data);
  s.plan(filter, min_seconds_of(set, arguments), list_only);
  const int repetitions = repetitions_of(s, set, arguments);
  auto defaults = default_flags(arguments, repetitions);
  initialize(defaults);
  s.enlist(repetitions);
  if (!list_only)
    say("%zu benchmarks, %d time%s each: about %.0f s", s.records().size(), repetitions, repetitions == 1 ? "" : "s",
        s.expected_seconds(repetitions));

  // JSON and CSV on standard output are Google Benchmark's own, and what is for people goes elsewhere.
  silent_reporter silent;
  const bool for_people = format == "console";
  const std::size_t ran = for_people ? benchmark::RunSpecifiedBenchmarks(&silent) : benchmark::RunSpecifiedBenchmarks();
  clear_status();
  benchmark::Shutdown();
  if (list_only) return 0;
  if (ran > 0) m.measure();
  std::fputs((listing(s, m, set) + summary(s, m, set)).c_str(), for_people ? stdout : stderr);
  std::fflush(stdout);
  const auto complaints = s.complaints();
  for (const std::string& complaint : complaints) say("attn_bench: %s", complaint.c_str());
  return ran > 0 && complaints.empty() ? 0 : 1;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  try {
    return bench::run({argv, argv + argc});
  } catch (const std::exception& error) {
    bench::say("%s", error.what());
    return 1;
  }
}
