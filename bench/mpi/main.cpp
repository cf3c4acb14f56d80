// attn_bench_mpi: operators over a sequence that several processes hold, by the number of processes.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <variant>

#include "../terminal.hpp"
#include "report.hpp"

namespace bench::mpi {
namespace {

struct known_flag {
  const char* name;
  std::variant<idx_t settings::*, double settings::*, std::string settings::*, bool settings::*> member;
  double least;
  const char* help;
};

const known_flag known[] = {
    {"heads", &settings::heads, 1, "heads of queries"},
    {"kv-heads", &settings::kv_heads, 1, "heads of keys and values"},
    {"dim", &settings::dim, 1, "size of a head"},
    {"window", &settings::window, 0, "keys on each side of a query, where there is a window"},
    {"length", &settings::length, 1, "tokens of the whole sequence, strong scaling"},
    {"linear-length", &settings::linear_length, 1, "the same for operators that are linear in the length"},
    {"part", &settings::part, 1, "tokens of each process, weak scaling"},
    {"linear-part", &settings::linear_part, 1, "the same for operators that are linear in the length"},
    {"seconds", &settings::seconds, 0, "how long each line is measured, at least"},
    {"filter", &settings::filter, 0, "only operators whose name begins so"},
    {"model-length", &settings::model_length, 1, "tokens of the modelled sequence"},
    {"linear-model-length", &settings::linear_model_length, 1, "the same for operators linear in the length"},
    {"machines", &settings::machines, 1, "how many are modelled, at most"},
    {"bandwidth", &settings::bandwidth, 1e-6, "of the modelled network, GB/s each way"},
    {"latency", &settings::latency, 0, "of the modelled network, microseconds"},
    {"out", &settings::out, 0, "a file for the results as JSON"},
    {"smoke", &settings::smoke, 0, "short lengths, once: does everything run?"},
    {"help", &settings::help, 0, "print this text"},
};

template <class T>
T number(const known_flag& flag, const std::string& text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !(static_cast<double>(value) >= flag.least))
    throw std::invalid_argument("attn_bench_mpi: --" + std::string(flag.name) + " expects a number >= " +
                                std::to_string(static_cast<int>(flag.least)) + "; found \"" + text + "\"");
  return value;
}

struct setter {
  settings& set;
  const known_flag& flag;
  const std::string& text;
  void operator()(idx_t settings::*m) const { set.*m = number<idx_t>(flag, text); }
  void operator()(double settings::*m) const { set.*m = number<double>(flag, text); }
  void operator()(std::string settings::*m) const { set.*m = text; }
  void operator()(bool settings::*m) const {
    if (!text.empty() && text != "true" && text != "false")
      throw std::invalid_argument("attn_bench_mpi: --" + std::string(flag.name) + " expects true or false; found \"" +
                                  text + "\"");
    set.*m = text != "false";
  }
};

settings settings_of(int argc, char** argv) {
  settings set;
  for (int n = 1; n < argc; ++n) {
    const std::string argument = argv[n];
    const std::size_t equals = std::min(argument.find('='), argument.size());
    const known_flag* found = nullptr;
    for (const known_flag& flag : known)
      if (argument.substr(0, equals) == "--" + std::string(flag.name)) found = &flag;
    if (!found)
      throw std::invalid_argument("attn_bench_mpi: unknown argument " + argument + " (--help lists all)");
    const std::string text = equals < argument.size() ? argument.substr(equals + 1) : "";
    std::visit(setter{set, *found, text}, found->member);
  }
  if (set.heads % set.kv_heads != 0)
    throw std::invalid_argument("attn_bench_mpi: --kv-heads expects a divisor of " + std::to_string(set.heads) +
                                "; found " + std::to_string(set.kv_heads));
  if (std::ranges::none_of(operators(), [&](const entry& of) { return of.name.starts_with(set.filter); }))
    throw std::invalid_argument("attn_bench_mpi: no operator's name begins with " + set.filter);
  if (set.smoke) set.length = set.part = 256, set.linear_length = set.linear_part = 2048;
  return set;
}

void print_help() {
  std::puts("mpiexec -n PROCESSES attn_bench_mpi [FLAGS]\n");
  for (const known_flag& flag : known) std::printf("  --%-20s %s\n", flag.name, flag.help);
}

void run(const team& all, const settings& set) {
  const bool prints = all.rank() == 0;
  machine m;
  std::vector<record> lines;
  for (const entry& of : operators()) {
    if (!of.name.starts_with(set.filter)) continue;
    for (const bool weak : {false, true}) {
      if (prints) show_status("%s, %s scaling", of.name.c_str(), weak ? "weak" : "strong");
      all.rest();
      if (prints) m.sample_peak();
      for (record& line : measure(all, set, of, weak)) lines.push_back(std::move(line));
    }
  }
  if (!prints) return;
  clear_status();
  std::fputs(tables(set, m, lines).c_str(), stdout);
  if (std::fflush(stdout) != 0) throw std::runtime_error("attn_bench_mpi: standard output cannot be written");
  if (!set.out.empty()) write_json(set.out, set, m, lines);
}

}  // namespace
}  // namespace bench::mpi

int main(int argc, char** argv) {
  using namespace bench::mpi;
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  int failed = 0;
  {
    const team all;
    settings set;
    try {
      set = settings_of(argc, argv);
    } catch (const std::invalid_argument& error) {  // the same on every process
      if (all.rank() == 0) bench::say("%s", error.what());
      failed = 1;
    }
    try {
      if (failed == 0 && !set.help) run(all, set);
    } catch (const std::exception& error) {
      bench::say("%s", error.what());
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
    if (set.help && all.rank() == 0) print_help();
  }
  MPI_Finalize();
  return failed;
}
