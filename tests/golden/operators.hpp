#pragma once
// The table of operators the golden test knows. An operator joins with the file NAME.cpp.
#include <functional>
#include <map>
#include <set>
#include <stdexcept>
#include <string>

#include "reference/softmax.hpp"
#include "support/case_file.hpp"

namespace testing {

// Gradients by the name of what they are of ("q": array "dq"), from the case's d_out.
using golden_gradients = std::function<std::map<std::string, tensor<double>>(const golden_case&)>;

struct golden_operator {
  std::string name;
  std::set<std::string> keys, arrays;  // what its cases may hold; anything else fails
  // Where float is the widest type that is tested, in_double is not called.
  std::function<reference::result(const golden_case&)> by_reference, in_double, in_float;
  golden_gradients gradients_by_reference{}, gradients_in_double{}, gradients_in_float{};
  // Times what the gradient of an array may err by in float; none: 1.
  std::function<double(const golden_case&, const std::string&)> float_gradient_factor{};
  std::string result = "out";  // the array that `out` of the results is compared with
};

// The table: each file NAME.cpp registers its operator by one object of this type.
class golden_entry {
 public:
  explicit golden_entry(golden_operator one) { table().push_back(std::move(one)); }

  static std::vector<golden_operator>& table() {
    static std::vector<golden_operator> all;
    return all;
  }
};

// What the exact operators' cases have in common.
inline const std::set<std::string> softmax_keys = {"operator", "source",        "tolerance",   "causal", "scale",
                                                   "lengths",  "query_lengths", "key_lengths", "softcap"};
inline const std::set<std::string> softmax_arrays = {"q", "k", "v", "out", "lse", "alibi_slopes", "sinks"};

inline std::set<std::string> with(std::set<std::string> names, const std::set<std::string>& more) {
  names.insert(more.begin(), more.end());
  return names;
}

// Operators that have no causal form accept "causal = false" only.
inline void require_not_causal(const golden_case& golden) {
  if (golden.flag("causal", false)) throw std::runtime_error(golden.name() + ": this operator has no causal form");
}

inline void read_softmax_options(const golden_case& golden, reference::softmax_options& options) {
  options.causal = golden.flag("causal", false);
  if (golden.has("scale")) options.scale = golden.number("scale");
  if (golden.has("softcap")) options.softcap = golden.number("softcap");
  options.lengths = golden.integers("lengths");
  options.query_lengths = golden.integers("query_lengths");
  options.key_lengths = golden.integers("key_lengths");
  if (golden.has("span")) options.span = golden.integer("span");
  const std::vector<idx_t> first = golden.integers("first_position");
  if (first.size() == 1) options.first_position = first[0];
  if (first.size() > 1) options.first_positions = first;
  options.alibi_slopes = golden.vector("alibi_slopes");
  options.sinks = golden.vector("sinks");
  options.relative_bias = golden.optional_array("relative_bias");
  options.relative_keys = golden.optional_array("relative_keys");
  options.relative_queries = golden.optional_array("relative_queries");
  if (golden.has_array("log_decay")) options.log_decay = golden.row_array("log_decay");
}

}  // namespace testing
