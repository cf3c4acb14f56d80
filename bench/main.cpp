// attn_bench: complexity curves of attention operators, on this machine and on real data.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "plan.hpp"
#include "report.hpp"
#include "sweep.hpp"
#include "terminal.hpp"

namespace bench {
namespace {

constexpr int most_visits = 5;

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

/// Heads and dim are those of the data of --input, and its length is measured unless it is not among those asked for.
/// `given`: the arguments, with the flags of attn_bench.
void take_shape(flags& set, const dataset& data, const std::vector<std::string>& given) {
  const auto take = [&](const char* name, idx_t& own, idx_t of_data) {
    if (!value_of(given, name, "").empty() && own != of_data)
      throw std::invalid_argument("attn_bench: --" + std::string(name) + " expects " + std::to_string(of_data) +
                                  ", which the data of --input has, or is left out; found " + std::to_string(own));
    own = of_data;
  };
  take("heads", set.heads, data.heads());
  take("dim", set.dim, data.dim());
  set.kv_heads = data.kv_heads();
  set.dim_v = data.dim_v();
  const bool long_enough = value_of(given, "min-length", "").empty() || data.length() >= set.min_length;
  if (long_enough && (set.max_length == 0 || data.length() <= set.max_length)) set.own_length = data.length();
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
  if (set.virtual_threads > 0) add("virtual_threads", std::to_string(set.virtual_threads));
  if (m.measures_all()) {
    add("peak_gflops_of_all", figure(m.peak_of_all() * 1e-9));
    add("read_gb_per_s_of_all", figure(m.read_bandwidth_of_all() * 1e-9));
    add("rewrite_gb_per_s_of_all", figure(m.rewrite_bandwidth_of_all() * 1e-9));
  }
  add("type", set.type);
  add("precision", set.precision);
  add("bf16_arithmetic", bf16_arithmetic());
  std::string names;
  for (const dataset& d : data) names += (names.empty() ? "" : ", ") + d.name();
  add("error_data", names);
  add("error_tokens", std::to_string(data[0].length()));
  if (!set.input.empty()) add("own_data", "true");
  add("comparison_length", std::to_string(comparison_length(set)));
}

/// How long each operator is timed in each repetition, at least.
double min_seconds_of(const flags& set, const std::vector<std::string>& given) {
  const double otherwise = set.smoke ? 0.01 : 0.05;
  const double wanted = std::atof(value_of(given, "benchmark_min_time", "0").c_str());
  return wanted > 0 ? wanted : otherwise;
}

/// Flags of Google Benchmark that the user did not give.
std::vector<std::string> default_flags(const std::vector<std::string>& given) {
  std::vector<std::string> defaults = {given[0]};
  // The sweep decides itself how often it runs; any time is enough.
  if (!is_given(given, "benchmark_min_time")) defaults.push_back("--benchmark_min_time=0.000001" ATTN_BENCH_SECONDS);
  return defaults;
}

/// Takes --benchmark_out out of `arguments`: Google Benchmark would write a file for every line. Opened before anything
/// is measured, so that a folder that cannot be written is told at once.
std::ofstream open_results(std::vector<std::string>& arguments) {
  std::ofstream file;
  if (value_of(arguments, "benchmark_out_format", "json") != "json")
    throw std::invalid_argument("attn_bench: --benchmark_out_format expects json; found \"" +
                                value_of(arguments, "benchmark_out_format", "") + "\"");
  const std::string path = value_of(arguments, "benchmark_out", "");
  std::erase_if(arguments, [](const std::string& a) { return a.starts_with("--benchmark_out"); });
  if (path.empty()) return file;
  file.open(path);
  if (!file) throw std::runtime_error("attn_bench: " + path + " cannot be written (--benchmark_out)");
  return file;
}

/// "low rank: linformer=#e07b00 nystrom=#a04000; kernels: ...": what the pictures show together, and in which colour.
std::string families_of(const std::vector<variant>& variants) {
  std::vector<std::pair<std::string, std::string>> families;
  for (const variant& x : variants) {
    if (x.family.empty() || x.has_setting() || x.type != variants[0].type) continue;
    auto family = std::ranges::find(families, x.family, &std::pair<std::string, std::string>::first);
    if (family == families.end()) family = families.insert(family, {x.family, ""});
    const std::string entry = ' ' + x.operator_name + '=' + x.colour;
    if (family->second.find(entry) == std::string::npos) family->second += entry;
  }
  std::string text;
  for (const auto& [title, members] : families) text += (text.empty() ? "" : "; ") + title + ':' + members;
  return text;
}

std::string list_of(const std::vector<idx_t>& lengths) {
  std::string text;
  for (const idx_t length : lengths) text += (text.empty() ? "" : " ") + std::to_string(length);
  return text;
}

/// What the pictures need besides the rows, known at the end alone.
void add_results_context(const sweep& s, const flags& set) {
  const auto add = [](const char* key, const std::string& value) { benchmark::AddCustomContext(key, value); };
  add("families", families_of(s.variants()));
  add("main_lengths", list_of(main_lengths(set)));
  add("not_run_time", listed(s.omitted(omission::time)));
  add("not_run_max_seconds", listed(s.omitted(omission::seconds)));
  add("not_run_memory", listed(s.omitted(omission::memory)));
}

/// In Google Benchmark's own form.
void write(benchmark::BenchmarkReporter& reporter, std::ostream& to, const sweep& s) {
  reporter.SetOutputStream(&to);
  reporter.SetErrorStream(&std::cerr);
  reporter.ReportContext({});
  for (const auto& run : s.results()) reporter.ReportRuns({run});
  reporter.Finalize();
}

/// Throws if something that was printed did not arrive, as on a full disk.
void check_printed() {
  std::cout.flush();
  if (!std::cout || std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    throw std::runtime_error("attn_bench: standard output cannot be written");
}

int run(std::vector<std::string> arguments) {
  const double started = seconds_now();
  const std::vector<std::string> given = arguments;
  flags set = take_flags(arguments);
  if (set.help) {
    std::fputs(flags_help(users_of_flags()).c_str(), stdout);
    check_printed();
    arguments.push_back("--help");
  }
  if (set.smoke && set.max_length == 0) set.max_length = 512;
  std::ofstream file = open_results(arguments);
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
  if (!set.input.empty()) take_shape(set, data[0], given);
  machine m(static_cast<int>(set.threads), set.virtual_threads > 0);
  sweep s(set, m, data);
  auto defaults = default_flags(arguments);
  initialize(defaults);
  const bool repeats_itself = is_given(arguments, "benchmark_repetitions");  // Google Benchmark does
  s.plan({.filter = filter,
          .min_seconds = min_seconds_of(set, arguments),
          .list_only = list_only,
          .most_visits = set.smoke || repeats_itself ? 1 : most_visits,
          .started = started});
  if (list_only) {
    check_printed();
    return 0;
  }
  show_status("measuring this machine");
  const double begin = seconds_now();
  m.measure();  // and once more at the end
  const double closing_seconds = 1.2 * (seconds_now() - begin);
  add_context(set, m, data);
  say("%s, %s, %s", processor_name().c_str(), ATTN_BENCH_COMPILER, Eigen::SimdInstructionSetsInUse());
  if (set.virtual_threads > 0)
    say("All times are simulated: those of %td threads, each with a core like this one and its memory to itself",
        set.virtual_threads);
  say("%zu benchmarks, up to %.0f s (--budget), the main curve first", s.records().size(), set.budget);
  s.run(closing_seconds);
  clear_status();
  if (!s.results().empty()) m.measure();
  add_results_context(s, set);
  bool written = true;
  if (file.is_open()) {
    benchmark::JSONReporter json;
    write(json, file, s);
    file.close();
    if (!file) say("attn_bench: the results could not be written (--benchmark_out)"), written = false;
  }
  // JSON and CSV on standard output are Google Benchmark's own, and what is for people goes elsewhere.
  const bool for_people = format == "console";
  if (!for_people) write(*benchmark::CreateDefaultDisplayReporter(), std::cout, s);
  benchmark::Shutdown();
  std::fputs((listing(s, m, set) + summary(s, m, set)).c_str(), for_people ? stdout : stderr);
  check_printed();
  const auto complaints = s.complaints();
  for (const std::string& complaint : complaints) say("attn_bench: %s", complaint.c_str());
  return written && !s.results().empty() && complaints.empty() ? 0 : 1;
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
