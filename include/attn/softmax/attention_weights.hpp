// attn: the weights of full_softmax themselves, for some queries, or summed over all of them for every key.
//
//   attn::full_softmax(q, k, v, out, {.causal = true, .lse = lse});
//   attn::attention_weights(q, k, rows, weights, {.causal = true, .lse = lse});  // of queries rows[n]: [B, H, n, Lk]
//   attn::key_weights(q, k, sums, {.causal = true, .lse = lse});                 // of keys: [B, H, Lk]
//
//   attention_weights:  weights[b, h, n, j] = e^(s_ij - lse_i), i = rows[n], s the final scores of full_softmax
//   key_weights:        sums[b, h, j] = sum_i e^(s_ij - lse_i): what key j has of all queries' attention, by which
//                       saliency is measured and cache entries are chosen that may go (Li et al. 2024, "SnapKV")
//
// Shapes   q [B, H, Lq, D], k [B, Hkv, Lk, D] and the options as full_softmax's, whose weights they are; weights
//          [B, H, n, Lk] and sums [B, H, Lk] in float, of double in double. A key that a query does not see has weight
//          0, and so has everything in rows of padding. With sinks the weights of a query add up to less than 1; with
//          dropout to anything, for those dropped are 0 and the others 1 / (1 - rate) times as large, each maybe above
//          1.
// Cost     2 B H Lk D operations for each query, and one exponential a pair; without lse 2 B H Lq Lk D more. Scratch:
//          the packed keys of one key head (or of as many as fill the threads), about Lk D numbers; never Lq x Lk.
// Throws   std::invalid_argument for shapes or options that do not fit, or rows there are not, before anything is
//          written.
//
// Where lse is given, its rounding, |lse| 2^-24 in float (double: 2^-53), is an error of the weights. Where it is not,
// it is computed again in more digits than one number has. Any number of threads gives the same bits.
#pragma once

#include <attn/softmax/detail/attention_weights_run.hpp>
#include <attn/softmax/full_softmax.hpp>

namespace attn { inline namespace ATTN_ISA {

namespace detail {

/// The checked call of attention_weights and key_weights: q and k with the forward call's options, and no values.
template <class Q, class K, class Given, class Score>
auto checked_weights_call(const char* name, const Q& q, const K& k, Given& options, Score& score, execution_ref& exec) {
  using S = element_of<const Q&>;
  const tensor_view<const S> queries = as_view(q), keys = as_view(k), no_values = keys.slice(3, 0, 0);
  tensor_view<S> no_result(nullptr, {queries.extent(0), queries.extent(1), queries.extent(2), 0});
  return checked_call<full_softmax_options>(name, queries, keys, no_values, no_result, options, score, exec);
}

}  // namespace detail

/// The weights of queries rows[n] (all queries, where `rows` is empty) for every key. See the top of the file.
template <viewable Q, viewable K, class Options = full_softmax_options<element_of<const Q&>>,
          class Score = detail::no_score>
void attention_weights(const Q& q, const K& k, list_view<idx_t> rows,
                       const view_field<compute_type<element_of<const Q&>>>& weights, Options&& options = {},
                       Score&& score = {}, execution_ref exec = {}) {
  auto call = detail::checked_weights_call("attention_weights", q, k, options, score, exec);
  const idx_t count = rows.empty() ? call.shape.queries : std::ssize(rows);
  for (const idx_t row : rows)
    if (row < 0 || row >= call.shape.queries) call.views.fail({"rows from 0 to ", call.shape.queries - 1}, row);
  call.views.write("weights", weights,
                   {{"weights batch = query batch", call.shape.batch},
                    {"weights heads = query heads", call.shape.heads},
                    {"weights rows", count},
                    {"weights keys = key length", call.shape.keys}});
  detail::run_attention_weights(call, rows, weights, {});
}

/// The weights of every key, summed over the queries. See the top of the file.
template <viewable Q, viewable K, class Options = full_softmax_options<element_of<const Q&>>,
          class Score = detail::no_score>
void key_weights(const Q& q, const K& k, const view_field<compute_type<element_of<const Q&>>, 3>& sums,
                 Options&& options = {}, Score&& score = {}, execution_ref exec = {}) {
  auto call = detail::checked_weights_call("key_weights", q, k, options, score, exec);
  call.views.write("sums", sums,
                   {{"sums batch = query batch", call.shape.batch},
                    {"sums heads = query heads", call.shape.heads},
                    {"sums keys = key length", call.shape.keys}});
  detail::run_attention_weights(call, {}, {}, sums);
}

}}  // namespace attn::ATTN_ISA
