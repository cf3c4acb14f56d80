#include "laws/operators/patterns.hpp"
#include "laws/stored.hpp"

namespace testing::strided_law {
namespace {

template <class T>
void add_strided(std::vector<law_operator<T>>& all) {
  using options = reference::strided_options;
  const auto strided = [](idx_t stride, bool causal, bool more = false) -> options_for<options> {
    return [=](const law_shape& s) {
      options o;
      o.stride = stride, o.causal = causal;
      if (more) set_scores(s, o);
      return o;
    };
  };
  const auto fixed = [](idx_t stride, idx_t summary, bool causal) -> options_for<options> {
    return [=](const law_shape&) {
      options o;
      o.fixed = true, o.stride = stride, o.summary = summary, o.causal = causal;
      return o;
    };
  };
  all.push_back(pattern_operator<T>("strided", strided(7, false)));
  for (bool causal : {false, true}) {
    all.back().limits.push_back(full_limit<T>("a stride of the length", strided(300, causal)));
    all.back().limits.push_back(full_limit<T>("a stride of 1", strided(1, causal)));
  }
  all.push_back(pattern_operator<T>("strided causal", strided(16, true)));
  all.push_back(pattern_operator<T>("strided causal, masked, with a score function", strided(9, true), true));
  all.push_back(pattern_operator<T>("strided of everything", strided(33, true, true)));
  all.push_back(pattern_operator<T>("fixed", fixed(20, 3, false)));
  all.back().limits.push_back(full_limit<T>("nothing but summaries", fixed(9, 9, false)));
  all.push_back(pattern_operator<T>("fixed causal", fixed(12, 1, true)));
  all.back().long_rows.push_back(long_form<T>("a stride of 1", strided(1, false)));
  all.back().without = {{"stream", "there is no step"}};
}
const law_entries entries("strided", [](auto& all) { add_strided(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  all.push_back(stored_softmax<compiled_strided, S>("strided causal", true, [](auto& o) { o.stride = 9; }));
}
const stored_entries stored_form("strided", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::strided_law
