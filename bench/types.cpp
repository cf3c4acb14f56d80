// The types of elements there are, and what variants of any of them have in common.
#include <algorithm>
#include <stdexcept>

#include "variant.hpp"

namespace bench {

std::vector<element_type>& element_types() {
  static std::vector<element_type> types;
  return types;
}

namespace {

/// f(name) for each of those between commas.
template <class F>
void each_name(const std::string& names, F&& f) {
  for (std::size_t begin = 0; begin <= names.size();) {
    const std::size_t end = std::min(names.find(',', begin), names.size());
    f(names.substr(begin, end - begin));
    begin = end + 1;
  }
}

}  // namespace

bool lists(const std::string& names, const std::string& name) {
  bool found = false;
  each_name(names, [&](const std::string& one) { found |= one == name; });
  return found;
}

std::vector<variant> make_variants(const flags& set) {
  std::vector<variant> all;
  std::string names;
  for (const element_type& type : element_types()) names += (names.empty() ? "" : " or ") + type.name;
  if (!set.cache_type.empty())
    each_name(set.cache_type, [](const std::string& name) {
      if (!lists("half,bfloat16,float8_e4m3,float8_e5m2,int8,int8_rotated,int8_channels,int4", name))
        throw std::invalid_argument("attn_bench: --cache-type expects half, bfloat16, float8_e4m3, float8_e5m2, int8, "
                                    "int8_rotated, int8_channels or int4; found \"" + name + "\"");
      if (!lists(ATTN_BENCH_CACHE_TYPES, name))
        throw std::invalid_argument("attn_bench: this attn_bench was not built for caches of " + name +
                                    " (cmake -DATTN_BENCH_CACHE_TYPES=..., which bench/run sets)");
    });
  if (set.precision != "standard" && set.precision != "fast")
    throw std::invalid_argument("attn_bench: --precision expects standard or fast; found \"" + set.precision + "\"");
  each_name(set.type, [&](const std::string& name) {
    const auto type = std::ranges::find(element_types(), name, &element_type::name);
    if (type == element_types().end())
      throw std::invalid_argument("attn_bench: --type expects " + names + ", which this attn_bench was built for " +
                                  "(cmake -DATTN_BENCH_TYPES=..., which bench/run sets); found \"" + name + "\"");
    for (variant& x : type->make(set)) all.push_back(std::move(x));
  });
  for (const variant& x : all)
    if (x.main)
      for (variant& rival : all) rival.main |= rival.name == x.rival;
  return all;
}

bool variant::sees_every_token(const std::vector<double>& errors) const {
  const double most = std::max(rounding, 1e-5);
  return !exact && !errors.empty() && std::ranges::all_of(errors, [&](double e) { return e <= most; });
}

std::map<std::string, std::string> users_of_flags() {
  std::map<std::string, std::string> users;
  std::string last;
  for (const variant& x : element_types().front().make({})) {
    if (x.operator_name.empty() || x.operator_name == last) continue;
    last = x.operator_name;
    for (const std::string& flag : x.uses) users[flag] += (users[flag].empty() ? "" : ", ") + last;
  }
  return users;
}

std::optional<traffic> traffic_of(const variant& x, idx_t length, double seconds, const machine& m) {
  const double bytes_moved = x.moved_bytes ? x.moved_bytes(length) : 0;
  if (bytes_moved == 0) return {};
  const double rate = bytes_moved / seconds,
               most = x.rewrites ? m.rewrite_bandwidth_of_all() : m.read_bandwidth_of_all();
  return traffic{rate, rate / most, x.rewrites ? "read-and-write bandwidth" : "read bandwidth"};
}

}  // namespace bench
