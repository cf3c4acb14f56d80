#include "report.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <span>

#include "terminal.hpp"

namespace bench {
namespace {

using points = std::vector<const record*>;  // of one operator, by length

constexpr index usual_length = 4096;

template <class... T>
std::string text(const char* format, T... values) {
  char line[256];
  std::snprintf(line, sizeof line, format, values...);
  return line;
}

double of_peak(const record& r, const machine& m, const flags& set) {
  return r.of->flops(r.length) / r.best() / (m.peak_flops * static_cast<double>(set.threads));
}

/// Slope of log time over log length: of the lengths from 4096 up, or of the upper half where they are too few.
std::optional<double> exponent(const points& all) {
  const auto long_ones = std::ranges::find_if(all, [](const record* r) { return r->length >= usual_length; });
  std::span<const record* const> fitted(long_ones, all.end());
  if (fitted.size() < 3) fitted = std::span(all).subspan(all.size() / 2);
  if (fitted.size() < 2) return {};
  double n = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (const record* r : fitted) {
    const double u = std::log2(static_cast<double>(r->length)), v = std::log2(r->best());
    ++n, x += u, y += v, xx += u * u, xy += u * v;
  }
  return (n * xy - x * y) / (n * xx - x * x);
}

/// The shortest length from which on it is faster at every length measured for both.
std::optional<index> beats_from(const points& all, const sweep& s) {
  std::optional<index> from;
  for (auto r = all.rbegin(); r != all.rend(); ++r) {
    const record* rival = s.find((*r)->of->rival + "/" + std::to_string((*r)->length));
    if (!rival || rival->seconds.empty()) continue;
    if ((*r)->best() >= rival->best()) break;
    from = (*r)->length;
  }
  return from;
}

std::vector<points> by_operator(const sweep& s) {
  std::vector<points> groups;
  for (const record& r : s.records()) {
    if (r.seconds.empty()) continue;
    auto group = std::ranges::find_if(groups, [&](const points& g) { return g.front()->of == r.of; });
    if (group == groups.end()) group = groups.insert(groups.end(), points{});
    group->push_back(&r);
  }
  std::ranges::sort(groups, {}, [](const points& g) { return g.front()->of; });  // the order of the table of operators
  return groups;
}

std::string error_text(const std::vector<double>& values, std::size_t datasets) {
  std::string line;
  if (values.empty())
    for (std::size_t i = 0; i < datasets; ++i) line += text("%10s", "-");
  for (double v : values) line += text(v < 0.01 ? "%10.1e" : "%10.2f", v);
  return line;
}

}  // namespace

std::string listing(const sweep& s, const machine& m, const flags& set) {
  const auto groups = by_operator(s);
  if (groups.empty()) return "";
  std::string lines = text("\n%-32s %10s %10s %10s %8s %10s %7s\n", "operator/length", "best", "median", "Gflop/s",
                           "of_peak", "scratch", "runs");
  for (const points& all : groups)
    for (const record* r : all) {
      const double per_second = 1 / r->best();
      lines += text("%-32s %10s %10s %10.1f %8.2f %10s %7zu", r->name().c_str(), time_text(r->best()).c_str(),
                    time_text(r->median()).c_str(), r->of->flops(r->length) * per_second * 1e-9, of_peak(*r, m, set),
                    memory_text(static_cast<double>(r->scratch_bytes)).c_str(), r->seconds.size());
      if (const auto moved = traffic_of(*r->of, r->length, r->best(), m))
        lines += text("   %.1f GB/s = %.2f of %s", moved->bytes_per_second * 1e-9, moved->share, moved->of);
      lines += '\n';
    }
  return lines;
}

std::string summary(sweep& s, const machine& m, const flags& set) {
  const auto groups = by_operator(s);
  if (groups.empty()) return "";
  std::size_t datasets = 0;
  for (const points& all : groups) datasets = std::max(datasets, s.errors_of(*all[0]->of).operators.size());
  std::string table =
      text("\n%-26s %9s %17s %8s %8s %10s", "operator", "exponent", "time at 4096", "of full", "of_peak", "scratch");
  for (std::size_t i = 0; i < datasets; ++i)
    table += text("%10s", datasets == 1 ? "error" : ("error " + std::to_string(i)).c_str());
  table += "  beats full from\n";
  bool elsewhere = false;
  for (const points& all : groups) {
    const record* shown = all.back();
    for (const record* r : all)
      if (r->length == usual_length) shown = r;
    std::string time = time_text(shown->best());
    if (shown->length != usual_length) {
      elsewhere = true;
      time += " @" + std::to_string(shown->length);
    }
    const variant& x = *shown->of;
    const auto slope = exponent(all);
    const auto from = beats_from(all, s);
    const record* rival = s.find(x.rival + "/" + std::to_string(shown->length));
    const bool compared = rival && rival != shown && !rival->seconds.empty();
    table += text("%-26s %9s %17s %8s %8.2f %10s", x.name.c_str(), slope ? text("%.2f", *slope).c_str() : "-",
                  time.c_str(), compared ? text("%.3f", shown->best() / rival->best()).c_str() : "-",
                  of_peak(*shown, m, set), memory_text(static_cast<double>(shown->scratch_bytes)).c_str());
    table += error_text(s.errors_of(x).operators, datasets);
    table += text("  %15s\n", x.name == x.rival ? "" : from ? std::to_string(*from).c_str() : "-");
  }
  for (const auto* name : {"full_softmax", "full_softmax_causal"})
    for (const points& all : groups)
      if (all[0]->of->name == name)
        table +=
            text("%-26s %9s %17s %8s %8s %10s",
                 all[0]->of->name == "full_softmax" ? "mean of values" : "mean of values, causal", "", "", "", "", "") +
            error_text(s.errors_of(*all[0]->of).mean_of_values, datasets) + "\n";
  table += "\nBest times, " +
           text("%td heads of %td, %td thread%s", set.heads, set.dim, set.threads, set.threads == 1 ? "" : "s") +
           text("; decoders: one token, %td query heads over %td, aft %td over %td.\n", 4 * set.heads, set.heads,
                set.heads, set.heads) +
           "exponent: slope of log time over log length." +
           (elsewhere ? " @: the longest length, where 4096 was not run.\n" : "\n") +
           "of full: that time over full_softmax's. of_peak: useful operations over the peak of the threads used.\n"
           "error: against full softmax in double on real data, relative.\n";
  return table;
}

}  // namespace bench
