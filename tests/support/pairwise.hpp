#pragma once
// Combinations of options: all of them in the native build, and in the others (SSE2, Clang, sanitizers; CMake sets
// ATTN_TEST_FEW_SHAPES) a pairwise selection: every two values of two options that meet in some combination meet in
// one that is left. Errors that need three particular options at once are the native build's to find.
//
//   struct choice { bool causal, sinks; dilation steps; };
//   for (const choice& c : selected(every_choice(), [](const choice& c) { return std::array{+c.causal, +c.sinks,
//                                                                                       int(c.steps)}; })) ...
//   for (int bits : selected_bits(6)) ...  // each bit an option: 0 to 63
#include <array>
#include <cstddef>
#include <set>
#include <vector>

namespace testing {

#if defined(ATTN_TEST_FEW_SHAPES)
inline constexpr bool few_shapes = true;
#else
inline constexpr bool few_shapes = false;
#endif

// Whether this build looks for data races alone: other builds compare the bits that threads give with those of one.
#if defined(ATTN_TEST_RACES_ONLY)
inline constexpr bool races_only = true;
#else
inline constexpr bool races_only = false;
#endif

// Positions in `rows` of a selection that holds every pair of levels that `rows` hold; row n has level rows[n][o] of
// option o. Greedy: each time the row with the most pairs that are still missing.
inline std::vector<std::size_t> pairwise(const std::vector<std::vector<int>>& rows) {
  using pair = std::array<int, 4>;  // option, level, option, level
  const auto pairs_of = [](const std::vector<int>& row) {
    std::vector<pair> pairs;
    const int options = static_cast<int>(row.size());
    for (int a = 0; a < options; ++a)
      for (int b = a; b < options; ++b)  // with itself too, for where there is but one option
        pairs.push_back({a, row[static_cast<std::size_t>(a)], b, row[static_cast<std::size_t>(b)]});
    return pairs;
  };
  std::set<pair> missing;
  for (const auto& row : rows)
    for (const pair& p : pairs_of(row)) missing.insert(p);
  std::vector<std::size_t> selection;
  while (!missing.empty()) {
    std::size_t best = 0, most = 0;
    for (std::size_t n = 0; n < rows.size(); ++n) {
      std::size_t gain = 0;
      for (const pair& p : pairs_of(rows[n])) gain += missing.count(p);
      if (gain > most) most = gain, best = n;
    }
    for (const pair& p : pairs_of(rows[best])) missing.erase(p);
    selection.push_back(best);
  }
  return selection;
}

// Of `all`, those this build tests. levels(choice): the level of each option, integers in any container.
template <class Choice, class Levels>
std::vector<Choice> selected(const std::vector<Choice>& all, Levels&& levels, bool few = few_shapes) {
  if (!few) return all;
  std::vector<std::vector<int>> rows;
  for (const Choice& choice : all) {
    const auto of_choice = levels(choice);
    rows.emplace_back(of_choice.begin(), of_choice.end());
  }
  std::vector<Choice> some;
  for (std::size_t n : pairwise(rows)) some.push_back(all[n]);
  return some;
}

// The numbers below 2^bits, each bit an option.
inline std::vector<int> selected_bits(int bits, bool few = few_shapes) {
  std::vector<int> all;
  for (int n = 0; n < 1 << bits; ++n) all.push_back(n);
  return selected(
      all,
      [bits](int n) {
        std::vector<int> levels;
        for (int bit = 0; bit < bits; ++bit) levels.push_back(n >> bit & 1);
        return levels;
      },
      few);
}

}  // namespace testing
