#include "report.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>

#include "plan.hpp"
#include "terminal.hpp"

namespace bench {
namespace {

using points = std::vector<const record*>;  // of one operator, by length

template <class... T>
std::string text(const char* format, T... values) {
  if constexpr (sizeof...(values) == 0) {
    return format;
  } else {
    char line[256];
    std::snprintf(line, sizeof line, format, values...);
    return line;
  }
}

/// "1 thread", "8 virtual threads"
std::string threads_of(const flags& set) {
  return text("%td %sthread%s", set.threads, set.virtual_threads > 0 ? "virtual " : "", set.threads == 1 ? "" : "s");
}

double of_peak(const record& r, const machine& m) {
  return r.of->flops(r.length) / r.best() / m.peak_of_all(r.of->products);
}

/// A column of the tables, where there are several threads.
std::string efficiency_text(const record& r) { return r.efficiency > 0 ? text("%.2f", r.efficiency) : "-"; }
bool shows_efficiency(const machine& m, const flags& set) { return m.measures_all() && set.efficiency; }
std::string efficiency_column(const machine& m, const flags& set, const std::string& content) {
  return shows_efficiency(m, set) ? text(" %10s", content.c_str()) : "";
}
/// What it says.
std::string efficiency_note(const machine& m, const flags& set) {
  if (!shows_efficiency(m, set)) return "";
  return text("efficiency: calls per second over those that %d processes of one thread each make at the same time.\n",
              m.threads());
}

/// Slope of log time over log length, from lengths of the main curve: the same for all operators.
struct fit {
  double slope;
  idx_t longest;  // of the lengths it is from
};
std::optional<fit> exponent(const points& all, const flags& set) {
  points fitted;
  const std::vector<idx_t> lengths = fitted_lengths(set);
  for (const record* r : all)
    if (std::ranges::count(lengths, r->length) > 0) fitted.push_back(r);
  if (fitted.size() < 2) return {};
  double n = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (const record* r : fitted) {
    const double u = std::log2(static_cast<double>(r->length)), v = std::log2(r->best());
    ++n, x += u, y += v, xx += u * u, xy += u * v;
  }
  return fit{(n * xy - x * y) / (n * xx - x * x), fitted.back()->length};
}

/// The shortest length from which on it is faster at every length measured for both.
std::optional<idx_t> beats_from(const points& all, const sweep& s) {
  std::optional<idx_t> from;
  for (auto r = all.rbegin(); r != all.rend(); ++r) {
    const record* rival = s.find((*r)->of->rival + "/" + std::to_string((*r)->length));
    if (!rival || rival->seconds.empty()) continue;
    if ((*r)->best() >= rival->best()) break;
    from = (*r)->length;
  }
  return from;
}

bool is_backward(const variant& x) { return x.backward; }
bool is_forward(const variant& x) { return !x.backward && !x.has_setting(); }
bool is_curve(const variant& x) { return !x.has_setting(); }

/// What was run of the wanted variants, by length.
std::vector<points> by_operator(const sweep& s, bool (*wanted)(const variant&)) {
  std::vector<points> groups;
  for (const record& r : s.records()) {
    if (r.seconds.empty() || !wanted(*r.of)) continue;
    auto group = std::ranges::find_if(groups, [&](const points& g) { return g.front()->of == r.of; });
    if (group == groups.end()) group = groups.insert(groups.end(), points{});
    group->push_back(&r);
  }
  std::ranges::sort(groups, {}, [](const points& g) { return g.front()->of; });  // the order of the table of operators
  return groups;
}

/// In lines of at most 118 characters.
std::string wrapped(const std::string& all) {
  std::string lines, line;
  for (std::size_t begin = 0; begin < all.size();) {
    const std::size_t end = std::min(all.find(' ', begin), all.size());
    const std::string word = all.substr(begin, end - begin);
    if (!line.empty() && line.size() + 1 + word.size() > 118) lines += line + '\n', line.clear();
    line += (line.empty() ? "" : " ") + word;
    begin = end + 1;
  }
  return lines + line + '\n';
}

int column_width(const dataset& d) { return std::max(10, static_cast<int>(d.name().size()) + 2); }

/// One column per dataset.
std::string error_text(const std::vector<double>& values, const std::vector<dataset>& data,
                       const char* mark = "") {
  std::string line;
  for (std::size_t i = 0; i < data.size(); ++i) {
    const std::string value = values.empty() ? "-" : text(values[i] < 0.01 ? "%.1e" : "%.2f", values[i]) + mark;
    line += text("%*s", column_width(data[i]), value.c_str());
  }
  return line;
}

/// Of an operator, marked where its setting sees every token of the data.
std::string error_text(sweep& s, const variant& x) {
  const auto& errors = s.errors_of(x).operators;
  return error_text(errors, s.data(), x.sees_every_token(errors) ? "*" : "");
}

/// The length the summary shows: that of comparisons, or the longest that every operator was run at, or the longest.
idx_t summary_length(const std::vector<points>& groups, const flags& set) {
  const idx_t compared = comparison_length(set);
  const auto has = [](const points& all, idx_t length) { return std::ranges::count(all, length, &record::length) > 0; };
  idx_t shown = groups[0].back()->length;
  for (const points& all : groups)
    if (has(all, compared)) return compared;
  for (const record* r : groups[0])
    if (std::ranges::all_of(groups, [&](const points& all) { return has(all, r->length); })) shown = r->length;
  return shown;
}

/// The record at `length`, or else the longest.
const record& shown_of(const points& all, idx_t length) {
  const auto found = std::ranges::find(all, length, &record::length);
  return found == all.end() ? *all.back() : **found;
}

std::string time_shown(const record& r, idx_t usual) {
  return time_text(r.best()) + (r.length == usual ? "" : " @" + std::to_string(r.length));
}

/// Time relative to that of the rival.
std::string of_rival(const sweep& s, const record& r, const char* format) {
  const record* rival = s.find(r.of->rival + "/" + std::to_string(r.length));
  return rival && rival->measured() ? text(format, r.best() / rival->best()) : "-";
}

std::string exponent_text(const points& all, const flags& set) {
  const auto found = exponent(all, set);
  if (!found) return "-";
  const bool whole = found->longest == fitted_lengths(set).back();
  return text("%.2f", found->slope) + (whole ? "" : " <=" + std::to_string(found->longest));
}

/// What the column says.
std::string exponent_note(const flags& set) {
  if (fitted_lengths(set).size() < 2) return "";
  std::string lengths;
  for (const idx_t length : fitted_lengths(set)) lengths += (lengths.empty() ? "" : ", ") + std::to_string(length);
  return "exponent: slope of log time over log length, at " + lengths +
         "; <=: up to this length, the longest of them " + "that was run.\n";
}

std::string names_of(const std::vector<dataset>& data) {
  std::string line;
  for (const dataset& d : data) line += text("%*s", column_width(d), d.name().c_str());
  return line;
}

/// The settings of every operator that has several, at one length, in the order of time.
std::string settings_summary(sweep& s) {
  std::vector<points> forms;
  for (const record& r : s.records()) {
    if (r.seconds.empty() || !r.of->has_setting()) continue;
    auto form = std::ranges::find_if(forms, [&](const points& f) { return f[0]->of->form == r.of->form; });
    if (form == forms.end()) {
      form = forms.insert(forms.end(), points{});
      const record* given = s.find(r.of->form + "/" + std::to_string(r.length));
      if (given && !given->seconds.empty()) form->push_back(given);
    }
    form->push_back(&r);
  }
  if (forms.empty()) return "";
  std::ranges::sort(forms, {}, [](const points& f) { return f[0]->of; });
  // Where the lengths of operators differ, those that are not this one say theirs (@).
  const idx_t length = forms[0][0]->length;
  std::string table =
      text("\n%-31s %-32s %12s %8s", "operator", "setting", text("time at %td", length).c_str(), "of full") +
      names_of(s.data()) + "\n";
  for (points& all : forms) {
    std::ranges::sort(all, {}, &record::best);
    for (const record* r : all)
      table += text("%-31s %-32s %12s %8s", r == all[0] ? r->of->form.c_str() : "",
                    r->of->label.empty() ? "default" : r->of->label.c_str(), time_shown(*r, length).c_str(),
                    of_rival(s, *r, "%.3f").c_str()) +
               error_text(s, *r->of) + "\n";
  }
  return table + text("Errors are those on the %td tokens of the data, with the same setting.\n", s.data()[0].length());
}

/// The backward passes, each beside its forward pass.
std::string backward_summary(const sweep& s, const machine& m, const flags& set) {
  const auto groups = by_operator(s, is_backward);
  if (groups.empty()) return "";
  const idx_t common = summary_length(groups, set);
  std::string table = text("\n%-31s %11s %17s %10s %8s", "backward pass", "exponent",
                           text("time at %td", common).c_str(), "of forward", "of_peak") +
                      efficiency_column(m, set, "efficiency") + text(" %10s\n", "scratch");
  for (const points& all : groups) {
    const record& shown = shown_of(all, common);
    table += text("%-31s %11s %17s %10s %8.2f", shown.of->name.c_str(), exponent_text(all, set).c_str(),
                  time_shown(shown, common).c_str(), of_rival(s, shown, "%.2f").c_str(), of_peak(shown, m)) +
             efficiency_column(m, set, efficiency_text(shown)) +
             text(" %10s\n", memory_text(static_cast<double>(shown.scratch_bytes)).c_str());
  }
  return table + "of forward: time relative to the forward call, which is not part of it.\n";
}

/// Other types of elements beside float.
std::string types_summary(sweep& s) {
  std::string table;
  for (const points& all : by_operator(s, is_curve)) {
    const variant& x = *all[0]->of;
    if (x.type == "float") continue;
    std::string of_float = x.form;
    of_float.resize(of_float.size() - x.type.size() - 1);
    for (auto at = all.rbegin(); at != all.rend(); ++at) {  // Clang 14 does not compile std::views::reverse of GCC 12
      const record* const r = *at;
      const record* rival = s.find(of_float + "/" + std::to_string(r->length));
      if (!rival || rival->seconds.empty()) continue;
      table += text("%-34s %10s %6s %12s %8.2f", of_float.c_str(), x.type.c_str(), std::to_string(r->length).c_str(),
                    time_text(r->best()).c_str(), r->best() / rival->best()) +
               error_text(s.errors_of(x).operators, s.data()) + "\n";
      break;
    }
  }
  if (table.empty()) return "";
  return text("\n%-34s %10s %6s %12s %8s", "elements of another type", "type", "length", "time", "of float") +
         names_of(s.data()) + "\n" + table + "of float: time relative to the same call with float elements.\n";
}

std::string forward_summary(sweep& s, const machine& m, const flags& set) {
  const auto groups = by_operator(s, is_forward);
  if (groups.empty()) return "";
  const idx_t common = summary_length(groups, set);
  const auto& data = s.data();
  const auto titles = [&](const char* of_operators, const char* of_exponents, const std::string& of_times,
                          const char* of_full, const char* peak, const char* efficiency, const char* scratch) {
    return text("%-31s %11s %17s %8s %8s", of_operators, of_exponents, of_times.c_str(), of_full, peak) +
           efficiency_column(m, set, efficiency) + text(" %10s", scratch);
  };
  const std::string nothing = titles("", "", "", "", "", "", "");
  std::string table = '\n' + nothing + text("%*s\n", column_width(data[0]), "error on") +
                      titles("operator", "exponent", text("time at %td", common), "of full", "of_peak", "efficiency",
                             "scratch");
  table += names_of(data) + "  faster than full from\n";
  bool elsewhere = false, some_see_all = false;
  std::string several;
  for (const points& all : groups) {
    const record& shown = shown_of(all, common);
    elsewhere = elsewhere || shown.length != common;
    const variant& x = *shown.of;
    const auto from = beats_from(all, s);
    table += titles(x.name.c_str(), exponent_text(all, set).c_str(), time_shown(shown, common),
                    of_rival(s, shown, "%.3f").c_str(), text("%.2f", of_peak(shown, m)).c_str(),
                    efficiency_text(shown).c_str(),
                    memory_text(static_cast<double>(shown.scratch_bytes)).c_str());
    table += error_text(s, x);
    if (x.sequences > 1) several += text("%s: one token of each of %td sequences.\n", x.name.c_str(), x.sequences);
    some_see_all = some_see_all || x.sees_every_token(s.errors_of(x).operators);
    table += text("  %21s\n", x.name == x.rival ? "" : from ? std::to_string(*from).c_str() : "-");
  }
  for (const auto* name : {"full_softmax", "full_softmax_causal"})
    for (const points& all : groups)
      if (all[0]->of->name == name)
        table +=
            titles(all[0]->of->name == "full_softmax" ? "mean of values" : "mean of values, causal", "", "", "", "", "",
                   "") +
            error_text(s.errors_of(*all[0]->of).mean_of_values, data) + "\n";
  table +=
      text("\nBest times; %td heads of %td, %s%s. ", set.heads, set.dim, threads_of(set).c_str(),
           set.virtual_threads > 0 ? " (times are simulated)" : "") +
      text("Decoding: one token, %td query heads over %td key heads (aft: %td).\n", 4 * set.heads, set.heads,
           set.heads) +
      several + exponent_note(set) +
      (elsewhere ? text("@: the figures of this line are those at this length, the longest that was run.\n") : "") +
      "of full: time relative to full_softmax at the same length. of_peak: useful operations per second over the "
      "sustained peak of the "
      "threads used.\n" +
      efficiency_note(m, set) +
      "error: relative to full softmax in double precision, on queries, keys and values " +
      (set.input.empty() ? "of a real model (bench/data)" : "of --input") + text(", %td tokens;\n", data[0].length()) +
      "lsh's with its queries as keys.\n" +
      (some_see_all ? "*: with this setting a query sees every token of the data; at longer lengths its error is "
                      "another.\n"
                    : "");
  return table;
}

/// What was not run, by name.
std::string not_run(const sweep& s, const flags& set) {
  std::string lines;
  for (const auto& [reason, why] :
       {std::pair(omission::time, text("the budget of %.0f s was spent (--budget)", set.budget)),
        std::pair(omission::seconds, text("one run takes more than %g s (--max-seconds)", set.max_seconds)),
        std::pair(omission::memory, std::string("they need more than 60 % of the memory available"))})
    if (const auto names = listed(s.omitted(reason)); !names.empty())
      lines += "\nNot run, as " + why + ":\n" + wrapped(names);
  return lines;
}

}  // namespace

std::string listing(const sweep& s, const machine& m, const flags& set) {
  const auto groups = by_operator(s, is_curve);
  if (groups.empty()) return not_run(s, set);
  std::string lines;
  if (set.virtual_threads > 0) lines += text("\nTimes are simulated: %s.\n", threads_of(set).c_str());
  if (set.threads > processors() && set.virtual_threads == 0)
    lines += text("\n%td threads on %d processor%s take turns: their times do not say what as many processors give.\n",
                  set.threads, processors(), processors() == 1 ? "" : "s");
  if (matrix_unit_is_refused())
    lines += text("\nThe operating system does not permit the use of AMX: bf16 numbers are multiplied by %s.\n",
                  bf16_arithmetic().c_str());
  lines += text("\n%s, one thread alone, sustained:\n", processor_name().c_str());
  for (const auto& [kind, name] : {std::pair(arithmetic::of_float, "float"), std::pair(arithmetic::of_double, "double"),
                                   std::pair(arithmetic::of_bf16, "bf16, summed in float")})
    if (m.peak_samples(kind) > 0)
      lines += text(
          "%.1f Gflop/s of fused multiply-adds in %s\n(median of %zu measurements between the operators; a tenth below "
          "%.1f, a tenth above %.1f)\n",
          m.peak_flops(kind) * 1e-9, name, m.peak_samples(kind), m.peak_quantile(0.1, kind) * 1e-9,
          m.peak_quantile(0.9, kind) * 1e-9) +
               (m.measures_all() ? text("%d threads at once: %.1f Gflop/s, %.2f of as many alone\n", m.threads(),
                                        m.peak_of_all(kind) * 1e-9,
                                        m.peak_of_all(kind) / (m.threads() * m.peak_flops(kind)))
                                 : "");
  lines += text("Memory: %.1f GB/s read, %.1f GB/s read and written back\n", m.read_bandwidth() * 1e-9,
                m.rewrite_bandwidth() * 1e-9);
  if (m.measures_all())
    lines += text("%d threads at once: %.1f GB/s read, %.1f GB/s read and written back\n", m.threads(),
                  m.read_bandwidth_of_all() * 1e-9, m.rewrite_bandwidth_of_all() * 1e-9);
  lines += text("A call: %.0f ns, full_softmax for one token of one head of 16\n", small_call_seconds() * 1e9);
  lines += text("\n%-36s %10s %10s %10s %8s %10s %7s\n", "operator/length", "best", "median", "Gflop/s", "of_peak",
                "scratch", "runs");
  for (const points& all : groups)
    for (const record* r : all) {
      const double per_second = 1 / r->best();
      lines += text("%-36s %10s %10s %10.1f %8.2f %10s %7zu", r->name().c_str(), time_text(r->best()).c_str(),
                    time_text(r->median()).c_str(), r->of->flops(r->length) * per_second * 1e-9, of_peak(*r, m),
                    memory_text(static_cast<double>(r->scratch_bytes)).c_str(), r->seconds.size());
      // The fastest run is one whose state happened to be in a cache: the median says what memory gives.
      if (const auto moved = traffic_of(*r->of, r->length, r->median(), m))
        lines += moved->share > 1.05
                     ? text("   %.1f GB/s: more than the %s measured", moved->bytes_per_second * 1e-9, moved->of)
                     : text("   %.1f GB/s: %.2f of the %s", moved->bytes_per_second * 1e-9, moved->share, moved->of);
      if (r->efficiency > 0) lines += text("   %.2f of %d processes", r->efficiency, m.threads());
      if (r->seconds.size() == 1) lines += "   a single run";
      lines += '\n';
    }
  return lines + not_run(s, set);
}

std::string summary(sweep& s, const machine& m, const flags& set) {
  return forward_summary(s, m, set) + settings_summary(s) + backward_summary(s, m, set) + types_summary(s);
}

}  // namespace bench
