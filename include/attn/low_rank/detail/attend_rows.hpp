// attn: the common parts of the attention operators of this family: the views of a call, queries that attend to packed
// keys, and waves of heads.
#pragma once

#include <attn/core/detail/attention_call.hpp>
#include <attn/core/detail/key_flags.hpp>
#include <attn/core/detail/product_choice.hpp>
#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/blockwise.hpp>
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
template <class S>
score_terms<compute_type<S>, no_score> terms_of_sums(const softmax_parameters<S>& given, idx_t dim) {
  score_terms<compute_type<S>, no_score> terms;
  set_terms(terms, given, dim);
  terms.mask = {};
  return terms;
}

/// Sets the rows of padding among [begin, end) of one head to zero.
template <class S>
void clear_padding(const attention_views<S>& x, idx_t b, idx_t h, idx_t begin, idx_t end,
                   const tensor_view<compute_type<S>, 3>& lse) {
  clear_rows(x.result(b, h), (std::max)(begin, x.lengths.queries(b)), (std::min)(end, x.shape.queries),
             row_of(lse, b, h), lse.stride(2));
}

/// Queries [i0, i0 + max_rows) of one head attend to slots [0, seen) of `packed`. complete(block) is called before the
/// division and may add to their sums.
template <class P, class S, class T = compute_type<S>, class Complete>
void attend_rows(const attention_views<S>& x, idx_t b, idx_t h, idx_t i0, const packed_keys<P>& packed, idx_t seen,
                 const score_terms<T, no_score>& terms, const tensor_view<T, 3>& lse, execution& exec, int worker,
                 Complete&& complete) {
  const idx_t i1 = (std::min)(i0 + max_rows, x.lengths.queries(b));
  if (i0 < i1) {
    auto block =
        exec.scratch(worker, [&](arena& memory) { return row_block<P>::layout(memory, x.shape.dim, x.shape.dim_v); });
    packed_keys<P> keys = packed;
    line_prefetcher next;
    next.add(x.query(b, h), i1, (std::min)(i1 + max_rows, x.lengths.queries(b)));
    next.add(x.result(b, h), i0, i1);
    keys.next = &next;
    block.begin(x.query(b, h), {i0, 1, nullptr}, i1 - i0, terms.query_factor());
    std::fill_n(block.ranges, block.rows, key_range{0, seen});
    attend(block, keys, terms);
    complete(block);
    finish(block, x.result(b, h), static_cast<const T*>(nullptr), row_of(lse, b, h), lse.stride(2));
  }
  clear_padding(x, b, h, i0, i0 + max_rows, lse);
}

/// step(scratch, batch item, head, number of the step, worker), a member function of `call`, `steps` times for every
/// head of a wave.
template <class Scratch, class Call, class Step>
void for_each_head(const wave<Scratch>& w, idx_t heads, idx_t steps, const Call& call, Step step) {
  w.for_each(steps, [&](idx_t n, Scratch& scratch, idx_t number, int worker) {
    (call.*step)(scratch, n / heads, n % heads, number, worker);
  });
}

}}}  // namespace attn::ATTN_ISA::detail
