#include "plan.hpp"

#include <algorithm>
#include <bit>

namespace bench {
namespace {

constexpr idx_t longest_doubled = 16384;

bool contains(const std::vector<idx_t>& lengths, idx_t length) { return std::ranges::count(lengths, length) > 0; }

bool is_power_of_4(idx_t n) {
  const auto bits = static_cast<std::size_t>(n);
  return std::has_single_bit(bits) && std::countr_zero(bits) % 2 == 0;
}

std::vector<idx_t> all_lengths(idx_t longest, const flags& set) {
  std::vector<idx_t> lengths;
  for (idx_t length = set.min_length; length <= longest; length *= length < longest_doubled ? 2 : 4)
    lengths.push_back(length);
  return lengths;
}

}  // namespace

idx_t comparison_length(const flags& set) { return set.own_length > 0 ? set.own_length : usual_length; }

std::vector<idx_t> lengths_of(const variant& x, const flags& set) {
  std::vector<idx_t> lengths = all_lengths(set.max_length > 0 ? set.max_length : x.longest, set);
  if (x.backward && std::ranges::any_of(lengths, is_power_of_4))
    std::erase_if(lengths, [](idx_t n) { return !is_power_of_4(n); });
  if (set.own_length > 0 && !x.backward && !contains(lengths, set.own_length))
    lengths.insert(std::ranges::lower_bound(lengths, set.own_length), set.own_length);
  if (x.has_setting() && !lengths.empty()) lengths = {compared_length(lengths, set)};
  return lengths;
}

idx_t compared_length(const std::vector<idx_t>& lengths, const flags& set) {
  const idx_t compared = comparison_length(set);
  return contains(lengths, compared) ? compared : lengths.back();
}

std::vector<idx_t> main_lengths(const flags& set) {
  const auto all = all_lengths(set.max_length > 0 ? std::min(set.max_length, longest_doubled) : longest_doubled, set);
  std::vector<idx_t> lengths;
  for (const idx_t n : {256, 1024, 4096, 16384})
    if (contains(all, n)) lengths.push_back(n);
  for (std::size_t n = 0; lengths.empty() && n < all.size(); n += 2) lengths.push_back(all[n]);
  // One length beyond where the main curve usually ends: --min-length=32768 --max-length=32768.
  if (lengths.empty()) lengths.push_back(set.min_length);
  return lengths;
}

tier tier_of(const variant& x, idx_t length, const flags& set) {
  if (x.has_setting()) return tier::settings;
  if (length == set.own_length && !x.backward) return x.main ? tier::main_curve : tier::other_forms;
  std::vector<idx_t> lengths = main_lengths(set);
  const idx_t last = lengths.back();
  if (x.main) {
    if (contains(lengths, length)) return tier::main_curve;
    return length <= last ? tier::between : tier::longer;
  }
  if (lengths.front() < 1024 && lengths.back() >= 1024) lengths.erase(lengths.begin());
  if (lengths.size() > 1 && lengths.back() > usual_length) lengths.pop_back();
  if (contains(lengths, length)) return tier::other_forms;
  return length < lengths.back() ? tier::between : tier::longer;
}

std::vector<idx_t> fitted_lengths(const flags& set) {
  std::vector<idx_t> lengths = main_lengths(set);
  if (lengths.size() > 2) lengths.erase(lengths.begin());
  return lengths;
}

std::string listed(const std::vector<std::pair<std::string, idx_t>>& names_and_lengths) {
  std::string text;
  const std::string* last = nullptr;
  for (const auto& [name, length] : names_and_lengths) {
    if (!last || *last != name) text += (last ? ", " : "") + name;
    text += ' ' + std::to_string(length);
    last = &name;
  }
  return text;
}

}  // namespace bench
