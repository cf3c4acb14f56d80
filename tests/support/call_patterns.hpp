#pragma once
// The operators that attend by a pattern, compiled once for all tests (call_block.cpp and so on).
#include <attn/softmax/bigbird_backward.hpp>
#include <attn/softmax/block_backward.hpp>
#include <attn/softmax/pattern_softmax_backward.hpp>
#include <attn/softmax/strided_backward.hpp>

#include "support/call.hpp"

namespace testing {

// A user's pattern, given query set by query set.
struct listed_pattern {
  struct piece {
    attn::position_range range{};
    std::vector<attn::idx_t> list{};  // instead of the range
    bool except_self = false;
    attn::idx_t left = attn::unlimited, right = attn::unlimited;  // of which a query sees those so near
  };
  struct query_set {
    attn::position_range queries;
    std::vector<piece> pieces;
  };
  std::vector<query_set> all;

  attn::idx_t query_sets(const attn::pattern_shape&) const { return std::ssize(all); }
  attn::position_range queries(const attn::pattern_shape&, attn::idx_t n) const {
    return all[static_cast<std::size_t>(n)].queries;
  }
  void keys(const attn::pattern_shape&, attn::idx_t n, auto&& see) const {
    for (const piece& p : all[static_cast<std::size_t>(n)].pieces) {
      const auto of_query = [&p](attn::idx_t at) { return attn::position_range{at - p.left, at + p.right + 1}; };
      const bool near = p.left != attn::unlimited;
      if (!p.list.empty())
        p.except_self ? see.except_self(p.list) : near ? see(p.list, of_query) : see(p.list);
      else
        p.except_self ? see.except_self(p.range) : near ? see(p.range, of_query) : see(p.range);
    }
  }
};
using joined_listed_pattern = attn::joined_patterns<listed_pattern, listed_pattern>;

template <class S>
struct compiled_pattern_softmax {
  using options = attn::pattern_softmax_options<S>;
  using gradients = attn::pattern_softmax_gradients<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const listed_pattern&, const options&,
                   const score_of<S>&, attn::execution&);
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const joined_listed_pattern&,
                   const options&, const score_of<S>&, attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, const listed_pattern&,
                       in_view<S> d_out, const gradients&, const options&, const score_of<S>&,
                       const score_backward_of<S>&, attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, const joined_listed_pattern&,
                       in_view<S> d_out, const gradients&, const options&, const score_of<S>&,
                       const score_backward_of<S>&, attn::execution&);
};

template <class S>
struct compiled_block {
  using options = attn::block_options<S>;
  using gradients = attn::block_gradients<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&, const score_of<S>&,
                   attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out, const gradients&,
                       const options&, const score_of<S>&, const score_backward_of<S>&, attn::execution&);
};

template <class S>
struct compiled_strided {
  using options = attn::strided_options<S>;
  using gradients = attn::strided_gradients<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&, const score_of<S>&,
                   attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out, const gradients&,
                       const options&, const score_of<S>&, const score_backward_of<S>&, attn::execution&);
};

template <class S>
struct compiled_bigbird {
  using options = attn::bigbird_options<S>;
  using gradients = attn::bigbird_gradients<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&, const score_of<S>&,
                   attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out, const gradients&,
                       const options&, const score_of<S>&, const score_backward_of<S>&, attn::execution&);
};

}  // namespace testing
