// attn_bench: what is run first, and what while there is time. Knows no operator: the sweep says how long a run takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <type_traits>
#include <vector>

namespace bench {

/// Groups of runs, the most worthwhile first. The main curve is always run, the others in this order while time is
/// left.
enum class tier {
  main_curve,   // every operator, forward, at the main lengths: 256, 1024, 4096 and 16384
  other_forms,  // causal, decoding and backward passes at 1024 and 4096
  between,      // the lengths between, up to where the main curve (of other forms: 4096) ends
  settings,     // other settings of an operator, at 4096
  longer        // the rest
};
inline constexpr tier all_tiers[] = {tier::main_curve, tier::other_forms, tier::between, tier::settings, tier::longer};
inline const char* name_of(tier t) {
  switch (t) {
    case tier::main_curve:
      return "main curve";
    case tier::other_forms:
      return "causal, decoding, backward";
    case tier::between:
      return "lengths between";
    case tier::settings:
      return "settings";
    default:
      return "longer";
  }
}

/// Why something was not run.
enum class omission { none, time, seconds, memory };

/// Runs the records of a sweep: tier by tier, then repetitions. What was run once is repeated first, before the lengths
/// beyond the main curve. The sweep has
///   rows()              each with worth, length, seconds (of every run), visits, failure and omitted
///   visit_seconds(r)    how long a visit of r takes
///   time_left()         seconds
///   beyond_limits(r)    why r is not run, however much time is left
///   visit(r, what)      runs it
///   announce(rest)      what is left of the main curve
///   most_visits()       of every record
template <class Sweep>
class order {
 public:
  explicit order(Sweep& sweep) : sweep_(sweep) {}

  void run() {
    for (const tier t : all_tiers) {
      if (t == tier::longer) repeat_single_runs();
      run_tier(t);
    }
    repeat_single_runs();
    // Visits of a record lie far apart: a disturbance of a few seconds then affects one of them, not all.
    for (int visits = 1; visits < sweep_.most_visits(); ++visits)
      repeat([&](const auto& r) { return r.visits == visits; });
  }

 private:
  void run_tier(tier t) {
    using record = std::remove_reference_t<decltype(*sweep_.rows().begin())>;
    std::vector<record*> rows;
    for (record& r : sweep_.rows())
      if (r.worth == t) rows.push_back(&r);
    // The main curve is run by length, so that its short lengths tell how long the others will take. Of the other tiers
    // what is quickest is run first: most of them are then run when the time ends.
    if (t != tier::main_curve) {
      std::map<const record*, double> expected;
      for (const record* r : rows) expected[r] = sweep_.visit_seconds(*r);
      std::ranges::stable_sort(rows, {}, [&](const record* r) { return expected[r]; });
    }
    // From 4096 tokens on the main curve takes seconds; by then its pace is known.
    const auto long_from =
        t == tier::main_curve && !rows.empty() ? std::min<decltype(rows[0]->length)>(4096, rows.back()->length) : 0;
    for (std::size_t n = 0; n < rows.size(); ++n) {
      record& r = *rows[n];
      if (long_from > 0 && r.length >= long_from && (n == 0 || rows[n - 1]->length < long_from))
        sweep_.announce({rows.begin() + static_cast<std::ptrdiff_t>(n), rows.end()});
      r.omitted = sweep_.beyond_limits(r);
      if (r.omitted == omission::none && t != tier::main_curve && sweep_.visit_seconds(r) > sweep_.time_left())
        r.omitted = omission::time;
      if (r.omitted == omission::none) sweep_.visit(r, name_of(t));
    }
  }

  void repeat_single_runs() {
    if (sweep_.most_visits() > 1) repeat([](const auto& r) { return r.seconds.size() == 1; });
  }

  template <class Wanted>
  void repeat(Wanted&& wanted) {
    for (auto& r : sweep_.rows())
      if (!r.seconds.empty() && r.failure.empty() && wanted(r) && sweep_.visit_seconds(r) <= sweep_.time_left())
        sweep_.visit(r, "repetitions");
  }

  Sweep& sweep_;
};

}  // namespace bench
