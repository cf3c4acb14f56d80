// What may mix the model's tokens. The program has full softmax, and what is linked with it: one .cpp for each operator
// beside this file, so that each is compiled once, alone, and only if it is wanted.
#pragma once

#include <attn/core/execution.hpp>
#include <attn/core/tensor_view.hpp>

#include <functional>
#include <string>
#include <vector>

namespace semantic_search {

using attn::idx_t;

// Attention of one text: q, k and v are [1, heads, tokens, dim].
using view = attn::tensor_view<const float>;
using out_view = attn::tensor_view<float>;
using attend_function =
    std::function<void(const view& q, const view& k, const view& v, const out_view& out, attn::execution& exec)>;

struct named_operator {
  std::string name;
  attend_function attend;
};

inline std::vector<named_operator>& operators() {
  static std::vector<named_operator> all;
  return all;
}

/// const add_operator linear("linear", [](...) { attn::linear(...); });
struct add_operator {
  add_operator(std::string name, attend_function attend) {
    operators().push_back({std::move(name), std::move(attend)});
  }
};

}  // namespace semantic_search
