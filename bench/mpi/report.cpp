#include "report.hpp"

#include <attn/core/detail/eigen.hpp>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <stdexcept>

#include "../terminal.hpp"

namespace bench::mpi {
namespace {

template <class... T>
std::string text(const char* format, T... values) {
  if constexpr (sizeof...(values) == 0) {
    return format;
  } else {
    char line[512];
    std::snprintf(line, sizeof line, format, values...);
    return line;
  }
}

/// The operator alone that a line is compared with.
const record& base_of(const std::vector<record>& lines, const record& line) {
  return *std::ranges::find_if(
      lines, [&](const record& r) { return r.of == line.of && r.weak == line.weak && r.processes == 0; });
}

/// Operations a second over those of the operator alone: with a sequence of the same length, time over time.
double speedup(const settings& set, const std::vector<record>& lines, const record& line) {
  return line.rate(set) / base_of(lines, line).rate(set);
}

double expected_bytes(const settings& set, const record& line) {
  return line.processes < 2 ? 0 : line.of->sent(set, static_cast<double>(line.length), line.processes);
}

std::string measured_table(const settings& set, const machine& m, const std::vector<record>& lines, bool weak) {
  std::string table = weak ? "\nWeak scaling: the sequence grows with the processes\n"
                           : "\nStrong scaling: a sequence of the same length\n";
  table += text("%-28s %8s %9s %10s %10s %9s %8s %8s %8s %11s %11s\n", "operator", "length", "processes", "best",
                "median", "Gflop/s", "of_peak", "speedup", "of ideal", "sent", "formula");
  for (const record& line : lines) {
    if (line.weak != weak) continue;
    const double faster = speedup(set, lines, line);
    table += text("%-28s %8td %9s %10s %10s %9.1f %8.2f %8.2f %8.2f", line.of->name.c_str(), line.length,
                  line.processes == 0 ? "alone" : std::to_string(line.processes).c_str(),
                  time_text(line.best()).c_str(), time_text(line.median()).c_str(), line.rate(set) * 1e-9,
                  line.rate(set) / line.parts() / m.peak_flops(), faster, faster / line.parts());
    table += line.processes < 2 ? std::string("\n")
                                : text(" %11zu %11.0f\n", line.sent.bytes, expected_bytes(set, line));
  }
  return table;
}

std::vector<idx_t> machine_counts(const settings& set) {
  std::vector<idx_t> counts;
  for (idx_t n = 1; n <= set.machines; n *= 2) counts.push_back(n);
  return counts;
}

double model_length(const settings& set, const entry& of) {
  return static_cast<double>(of.linear ? set.linear_model_length : set.model_length);
}

double modelled(const settings& set, const record& base, idx_t machines) {
  const network net{set.bandwidth * 1e9, set.latency * 1e-6};
  return base.of->model(set, net, base.rate(set), model_length(set, *base.of), static_cast<double>(machines));
}

std::string model_table(const settings& set, const std::vector<record>& lines) {
  std::string table = text(
      "\nA model, nothing measured: machines of one thread, each as fast as `alone` above, on a network of %g GB/s and\n"
      "%g us. Time, and how many times as fast as one machine\n%-28s %8s", set.bandwidth, set.latency, "operator", "length");
  for (idx_t n : machine_counts(set)) table += text(" %10td", n);
  for (const record& base : lines) {
    if (base.weak || base.processes != 0) continue;
    table += text("\n%-28s %8.0f", base.of->name.c_str(), model_length(set, *base.of));
    for (idx_t n : machine_counts(set)) table += text(" %10s", time_text(modelled(set, base, n)).c_str());
    table += text("\n%-28s %8s", "", "");
    for (idx_t n : machine_counts(set)) table += text(" %10.2f", modelled(set, base, 1) / modelled(set, base, n));
  }
  return table + "\n";
}

/// "full_softmax=#1a1a1a sliding_window=#1f77d0": of every operator.
std::string colours() {
  std::string all;
  for (const entry& x : operators()) all += (all.empty() ? "" : " ") + x.name + '=' + x.colour;
  return all;
}

}  // namespace

std::string tables(const settings& set, const machine& m, const std::vector<record>& lines) {
  return text("%s, %s, %s: %.1f Gflop/s of fused multiply-adds a core\n%td heads over %td key heads of %td, float, one "
              "thread a process\n",
              processor_name().c_str(), ATTN_BENCH_COMPILER, Eigen::SimdInstructionSetsInUse(), m.peak_flops() * 1e-9,
              set.heads, set.kv_heads, set.dim) +
         measured_table(set, m, lines, false) + measured_table(set, m, lines, true) +
         "\nalone: the operator of one process. Times are those of the slowest process. speedup: operations a second over\n"
         "those of alone; of ideal: that over the number of processes. sent: bytes of messages of the process that sends "
         "most,\ncounted, and by formula.\n" +
         model_table(set, lines);
}

void write_json(const std::string& path, const settings& set, const machine& m, const std::vector<record>& lines) {
  std::ofstream file(path);
  file << text("{\n  \"context\": {\"processor\": \"%s\", \"compiler\": \"%s\", \"simd\": \"%s\", \"heads\": \"%td\", "
               "\"kv_heads\": \"%td\", \"dim\": \"%td\", \"threads\": \"1\", \"peak_gflops\": \"%.4g\", ",
               processor_name().c_str(), ATTN_BENCH_COMPILER, Eigen::SimdInstructionSetsInUse(), set.heads,
               set.kv_heads, set.dim, m.peak_flops() * 1e-9)
       << "\"colours\": \"" + colours() + "\", "
       << text("\"window\": \"%td\", \"bandwidth_gb_per_s\": \"%g\", \"latency_us\": \"%g\"},\n  \"benchmarks\": [",
               set.window, set.bandwidth, set.latency);
  const char* comma = "";
  for (const record& line : lines) {
    file << comma
         << text("\n    {\"name\": \"mpi_%s/%s/%td/processes:%d\", \"run_type\": \"iteration\", \"operator\": \"%s\", "
                 "\"scaling\": \"%s\", \"length\": %td, \"processes\": %d, ",
                 line.of->name.c_str(), line.weak ? "weak" : "strong", line.length, line.processes,
                 line.of->name.c_str(), line.weak ? "weak" : "strong", line.length, line.processes)
         << text("\"repetitions\": %zu, \"best_ms\": %.6g, \"median_ms\": %.6g, \"flops_per_second\": %.6g, \"speedup\": "
                 "%.4f, \"messages\": %zu, \"sent_bytes\": %zu, \"formula_bytes\": %.0f, \"agreement_bytes\": %zu}",
                 line.seconds.size(), line.best() * 1e3, line.median() * 1e3, line.rate(set),
                 speedup(set, lines, line), line.sent.messages, line.sent.bytes, expected_bytes(set, line),
                 line.sent.collective_bytes);
    comma = ",";
  }
  file << "\n  ],\n  \"model\": [";
  comma = "";
  for (const record& base : lines) {
    if (base.weak || base.processes != 0) continue;
    for (idx_t n : machine_counts(set)) {
      file << comma
           << text("\n    {\"operator\": \"%s\", \"length\": %.0f, \"machines\": %td, \"ms\": %.6g}",
                   base.of->name.c_str(), model_length(set, *base.of), n, modelled(set, base, n) * 1e3);
      comma = ",";
    }
  }
  file << "\n  ]\n}\n";
  if (!file.flush()) throw std::runtime_error("attn_bench_mpi: cannot write " + path);
}

}  // namespace bench::mpi
