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
    const double found = data.back().mean_error(false);
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
  add("peak_gflops", figure(m.peak_flops * 1e-9));
  add("copy_gb_per_s", figure(m.copy_bandwidth * 1e-9));
  add("read_gb_per_s", figure(m.read_bandwidth * 1e-9));
  add("heads", std::to_string(set.heads));
  add("dim", std::to_string(set.dim));
  add("threads", std::to_string(set.threads));
  add("window", std::to_string(set.window));
  add("rank", std::to_string(set.rank));
  add("landmarks", std::to_string(set.landmarks));
  add("error_data", set.input.empty() ? "use_lite_layer0, use_lite_layer1" : set.input);
  for (std::size_t i = 0; i < data.size(); ++i)
    add(i == 0 ? "mean_error" : "mean_error_1", figure(data[i].mean_error(false)));
}

/// What the user did not say: how often and how long, so that the sweep fits its budget.
std::vector<std::string> default_flags(const sweep& s, const flags& set, const std::vector<std::string>& given,
                                       int& repetitions, double& min_seconds) {
  std::vector<std::string> defaults = {given[0]};
  min_seconds = set.smoke ? 0.05 : 0.1;
  if (is_given(given, "benchmark_min_time"))
    min_seconds = std::atof(value_of(given, "benchmark_min_time", "0.1").c_str());
  else
    defaults.push_back("--benchmark_min_time=" + std::to_string(min_seconds) + ATTN_BENCH_SECONDS);
  repetitions = set.smoke ? 1
                          : std::clamp(static_cast<int>(set.budget / std::max(s.pass_seconds(min_seconds), 1e-3)), 1,
                                       most_repetitions);
  if (is_given(given, "benchmark_repetitions"))
    repetitions = std::max(1, std::atoi(value_of(given, "benchmark_repetitions", "1").c_str()));
  else
    defaults.push_back("--benchmark_repetitions=" + std::to_string(repetitions));
  // Repetitions far apart in time: a disturbance of a few seconds then spoils one of them, not all.
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
  if (set.smoke && set.max_length == 0) set.max_length = 1024;
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
  machine m{};
  if (!list_only) {
    show_status("measuring this machine");
    m = measure_machine();
    add_context(set, m, data);
    say("%s, %s, %s", processor_name().c_str(), ATTN_BENCH_COMPILER, Eigen::SimdInstructionSetsInUse());
    say("one core: %.1f Gflop/s of fused multiply-adds; memory: %.1f GB/s read, %.1f GB/s scaled copy",
        m.peak_flops * 1e-9, m.read_bandwidth * 1e-9, m.copy_bandwidth * 1e-9);
  }
  sweep s(set, m, data);
  s.plan(filter, list_only);
  int repetitions = 1;
  double min_seconds = 0;
  auto defaults = default_flags(s, set, arguments, repetitions, min_seconds);
  initialize(defaults);
  s.enlist(repetitions, min_seconds);
  if (!list_only)
    say("%zu benchmarks, %d time%s, about %.0f s", s.records().size(), repetitions, repetitions == 1 ? "" : "s",
        repetitions * s.pass_seconds(min_seconds));

  // JSON and CSV on standard output are Google Benchmark's own, and what is for people goes elsewhere.
  silent_reporter silent;
  const bool for_people = format == "console";
  const std::size_t ran = for_people ? benchmark::RunSpecifiedBenchmarks(&silent) : benchmark::RunSpecifiedBenchmarks();
  clear_status();
  benchmark::Shutdown();
  if (list_only) return 0;
  std::fputs((listing(s, m, set) + summary(s, m, set)).c_str(), for_people ? stdout : stderr);
  std::fflush(stdout);
  if (const double end = measure_peak_flops(); std::abs(end / m.peak_flops - 1) > 0.03)
    say("note: the peak is %.1f Gflop/s now and was %.1f at the start: the clock has changed, of_peak means less",
        end * 1e-9, m.peak_flops * 1e-9);
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
