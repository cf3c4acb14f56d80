// attn: the parts of a call with a key_mask that all operators whose rows are sums of keys share.
#pragma once

#include <attn/core/detail/attention_call.hpp>
#include <attn/core/detail/key_flags.hpp>
#include <attn/softmax/detail/score_terms.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// While it lives, sequences of a call in which every key is hidden have no keys.
class seen_lengths {
 public:
  seen_lengths(const key_mask_view& mask, idx_t batch, sequence_lengths& lengths, execution& exec)
      : list_(exec.workspace([&](arena& memory) { return memory.allocate<idx_t>(mask ? batch : 0); })) {
    const key_flags keys(mask);
    if (!keys || batch == 0) return;
    for (idx_t b = 0; b < batch; ++b) (*list_)[b] = keys.any(b, 0, lengths.keys(b)) ? lengths.keys(b) : 0;
    lengths.given_keys = {*list_, static_cast<std::size_t>(batch)};
  }

 private:
  execution::persistent_workspace<idx_t*> list_;
};

/// The terms of scores of rows that are sums of keys, none of which is hidden.
template <class T, class Options>
score_terms<T, no_score> terms_of_sums(const Options& options, idx_t dim) {
  score_terms<T, no_score> terms = terms_of<T>(options, dim);
  terms.mask = {};
  return terms;
}

}}}  // namespace attn::ATTN_ISA::detail
