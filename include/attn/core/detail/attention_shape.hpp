// attn: the shapes every attention operator shares, and the true lengths of its sequences.
//   q [B, H, Lq, D]   k [B, Hkv, Lk, D]   v [B, Hkv, Lk, Dv]   out [B, H, Lq, Dv]   Hkv divides H
#pragma once

#include <attn/core/detail/call_views.hpp>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

/// The furthest position of a token, in either direction: sums of positions do not overflow.
inline constexpr idx_t furthest_position = idx_t(1) << 40;

struct attention_shape {
  idx_t batch = 0, heads = 0, kv_heads = 0, queries = 0, keys = 0, dim = 0, dim_v = 0;

  idx_t group() const { return kv_heads ? heads / kv_heads : 0; }
  /// Multiplications and additions of one query and one key in every head.
  double operations_per_score() const {
    return 2 * static_cast<double>(batch) * static_cast<double>(heads) * static_cast<double>(dim + dim_v);
  }
};

/// Checks the extents of the four views against one another and returns what they agree on. The batch and head extents
/// of all four are named by q; k names the key length, v the value dim.
[[gnu::noinline]] inline attention_shape check_attention_extents(const validator& check, const memory_layout& q,
                                                                 const memory_layout& k, const memory_layout& v,
                                                                 const memory_layout& out) {
  const attention_shape s{q.extents[0], q.extents[1], k.extents[1], q.extents[2],
                          k.extents[2], q.extents[3], v.extents[3]};
  if (s.heads > 0 && (s.kv_heads == 0 || s.heads % s.kv_heads != 0))
    check.fail({"key heads that divide the query heads ", s.heads}, s.kv_heads);
  if (((s.batch ^ k.extents[0]) | (s.batch ^ v.extents[0]) | (s.kv_heads ^ v.extents[1]) | (s.dim ^ k.extents[3]) |
       (s.keys ^ v.extents[2]) | (s.batch ^ out.extents[0]) | (s.heads ^ out.extents[1]) |
       (s.queries ^ out.extents[2]) | (s.dim_v ^ out.extents[3])) != 0)  // making the table takes longer
    check.extents({{"key batch = query batch", s.batch, k.extents[0]},
                   {"value batch = query batch", s.batch, v.extents[0]},
                   {"value heads = key heads", s.kv_heads, v.extents[1]},
                   {"key dim = query dim", s.dim, k.extents[3]},
                   {"value length = key length", s.keys, v.extents[2]},
                   {"out batch = query batch", s.batch, out.extents[0]},
                   {"out heads = query heads", s.heads, out.extents[1]},
                   {"out length = query length", s.queries, out.extents[2]},
                   {"out dim = value dim", s.dim_v, out.extents[3]}});
  std::size_t bits = 0;  // of all extents: where they are small, so are their products
  for (const memory_layout* x : {&q, &k, &v, &out})
    for (idx_t n : x->extents) bits |= static_cast<std::size_t>(n);
  for (const memory_layout* x : {&q, &k, &v, &out})  // also those of no elements, whose other extents are counted
    if (bits >= 2048 && checked_product(x->extents) < 0)
      check.fail("extents that memory can hold", error_text::list(x->extents, 4));
  return s;
}

/// The views of a call, and what their extents agree on. It writes out and, where it is given, lse [B, H, Lq].
[[gnu::noinline]] inline attention_shape check_attention(call_views& views, const memory_layout& q,
                                                         const memory_layout& k, const memory_layout& v,
                                                         const memory_layout& out, const memory_layout& lse) {
  views.read("q", q), views.read("k", k), views.read("v", v);
  if (lse.given()) views.write("lse", lse);
  views.write("out", out);
  const attention_shape s = check_attention_extents(views, q, k, v, out);
  if (lse.given())
    views.extents({{"lse batch = query batch", s.batch, lse.extents[0]},
                   {"lse heads = query heads", s.heads, lse.extents[1]},
                   {"lse length = query length", s.queries, lse.extents[2]}});
  return s;
}
/// What else a backward call reads: d_out of the shape of out, and lse and d_lse, where they are given, [B, H, Lq].
[[gnu::noinline]] inline void read_gradient_of_out(call_views& views, const attention_shape& s,
                                                   const memory_layout& out, const memory_layout& d_out,
                                                   const memory_layout& lse, const memory_layout& d_lse) {
  views.read_like("d_out", d_out, "out", out);
  const tensor_view<const float, 3> rows(nullptr, {s.batch, s.heads, s.queries});
  if (lse.given()) views.read_like("lse", lse, "the rows of out", rows);
  if (d_lse.given()) views.read_like("d_lse", d_lse, "the rows of out", rows);
}

/// Tokens k [B, Hkv, n, D] and v [B, Hkv, n, Dv] for a cache of these extents.
[[gnu::noinline]] inline void check_tokens(const validator& check, idx_t batch, idx_t kv_heads, idx_t dim, idx_t dim_v,
                                           const memory_layout& k, const memory_layout& v) {
  check.readable("k", k), check.readable("v", v);
  check.extents({{"key batch = cache batch", batch, k.extents[0]},
                 {"key heads = cache heads", kv_heads, k.extents[1]},
                 {"key dim = cache dim", dim, k.extents[3]},
                 {"value batch = cache batch", batch, v.extents[0]},
                 {"value heads = cache heads", kv_heads, v.extents[1]},
                 {"value dim = cache value dim", dim_v, v.extents[3]},
                 {"value length = key length", k.extents[2], v.extents[2]}});
}

/// True lengths per batch item: those given, else the extents.
struct sequence_lengths {
  idx_t full_queries = 0, full_keys = 0;
  std::span<const idx_t> given_queries{}, given_keys{};

  idx_t queries(idx_t batch) const {
    return given_queries.empty() ? full_queries : given_queries[static_cast<std::size_t>(batch)];
  }
  idx_t keys(idx_t batch) const { return given_keys.empty() ? full_keys : given_keys[static_cast<std::size_t>(batch)]; }
};

inline void check_length_list(const validator& check, const char* what, std::span<const idx_t> list, idx_t batch,
                              idx_t longest) {
  if (list.empty()) return;
  check.one_per(what, "batch item", batch, static_cast<idx_t>(list.size()));
  for (idx_t n : list)
    if (n < 0 || n > longest) check.fail({what, " from 0 to ", longest}, n);
}

/// `lengths` holds for queries and keys alike; `query_lengths` and `key_lengths` for one side each.
[[gnu::noinline]] inline sequence_lengths check_lengths(const validator& check, const attention_shape& s,
                                                        std::span<const idx_t> lengths,
                                                        std::span<const idx_t> query_lengths,
                                                        std::span<const idx_t> key_lengths) {
  const bool both = !lengths.empty();
  if (both && (!query_lengths.empty() || !key_lengths.empty()))
    check.fail("either lengths, or query_lengths and key_lengths", "both");
  if (both && s.queries != s.keys)
    check.fail({"query_lengths and key_lengths where query length ", s.queries, " and key length ", s.keys, " differ"},
               "lengths");
  if (both) query_lengths = key_lengths = lengths;
  check_length_list(check, both ? "lengths" : "query_lengths", query_lengths, s.batch, s.queries);
  check_length_list(check, both ? "lengths" : "key_lengths", key_lengths, s.batch, s.keys);
  return {s.queries, s.keys, query_lengths, key_lengths};
}
template <class Options>
sequence_lengths check_lengths(const validator& check, const attention_shape& s, const Options& options) {
  sequence_lengths all{s.queries, s.keys, {}, {}};
  if (!options.lengths.empty() || !options.query_lengths.empty() || !options.key_lengths.empty())
    all = check_lengths(check, s, options.lengths, options.query_lengths, options.key_lengths);
  return all;
}

/// A list with one setting per head, or an empty one.
template <class T>
void check_per_head(const validator& check, const char* what, std::span<const T> list, idx_t heads) {
  if (!list.empty()) check.one_per(what, "head", heads, static_cast<idx_t>(list.size()));
}

/// Entry `head` of a per-head list, or null where there is none.
template <class T>
const T* per_head(std::span<const T> list, idx_t head) {
  return list.empty() ? nullptr : list.data() + head;
}

/// The entry of a head in a list that has one for all heads, or one for each; 1 where there is none.
inline idx_t step_of_head(std::span<const idx_t> list, idx_t head) {
  return list.empty() ? 1 : list[list.size() == 1 ? 0 : static_cast<std::size_t>(head)];
}

/// The types of a call, checked at compile time. The return type makes compilers do so where it is called: what else is
/// wrong with such a call comes after the sentence.
template <class Q, class K, class V, class O>
constexpr auto require_one_element_type() {
  static_assert(decltype(as_view(std::declval<Q>()))::rank == 4, "attn: views must be [batch, head, length, dim]");
  static_assert(element<element_of<Q>>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  static_assert(std::same_as<element_of<Q>, element_of<K>> && std::same_as<element_of<Q>, element_of<V>> &&
                    std::same_as<element_of<Q>, element_of<O>>,
                "attn: q, k, v and out must have one element type");
  static_assert(!std::is_const_v<typename decltype(as_view(std::declval<O>()))::element_type>,
                "attn: out must be writable, but its elements are const");
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
