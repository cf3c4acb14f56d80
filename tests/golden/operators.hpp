#pragma once
// The table of operators the golden test knows. An operator joins with one entry.
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
  std::function<reference::result(const golden_case&)> by_reference, in_double, in_float;
  // None: the operator has no backward pass yet.
  golden_gradients gradients_by_reference{}, gradients_in_double{}, gradients_in_float{};
};

golden_operator golden_full_softmax();
golden_operator golden_sliding_window();
golden_operator golden_block();
golden_operator golden_strided();
golden_operator golden_bigbird();
golden_operator golden_lsh();
golden_operator golden_topk_blocks();
golden_operator golden_long_short();
golden_operator golden_linformer();
golden_operator golden_nystrom();
golden_operator golden_linear();
golden_operator golden_performer();
golden_operator golden_rfa();
golden_operator golden_delta_rule();
golden_operator golden_fnet();
golden_operator golden_reversible();
golden_operator golden_aft_full();
golden_operator golden_aft_local();
golden_operator golden_aft_simple();
golden_operator golden_aft_conv();

inline std::vector<golden_operator> golden_operators() {
  return {
      golden_full_softmax(),
      golden_sliding_window(),
      golden_block(),
      golden_strided(),
      golden_bigbird(),
      golden_lsh(),
      golden_topk_blocks(),
      golden_long_short(),
      golden_linformer(),
      golden_nystrom(),
      golden_linear(),
      golden_performer(),
      golden_rfa(),
      golden_delta_rule(),
      golden_fnet(),
      golden_reversible(),
      golden_aft_full(),
      golden_aft_local(),
      golden_aft_simple(),
      golden_aft_conv(),
  };
}

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
  options.alibi_slopes = golden.vector("alibi_slopes");
  options.sinks = golden.vector("sinks");
}

}  // namespace testing
