#pragma once
// The operators with every argument as a plain view, compiled once for all tests (call_*.cpp):
// instantiating them is most of what building the tests costs.
#include <functional>
#include <tuple>

#include <attn/core/threads.hpp>
#include <attn/softmax/full_softmax.hpp>
#include <attn/softmax/full_softmax_backward.hpp>
#include <attn/softmax/full_softmax_step.hpp>
#include <attn/softmax/sliding_window.hpp>
#include <attn/softmax/sliding_window_backward.hpp>
#include <attn/softmax/sliding_window_step.hpp>

namespace testing {

// The element types tests run for. Under a sanitizer, where compiling takes several times as long, one of each kind;
// Eigen::half, which differs from bfloat16 in nothing but how it is converted, in one of the builds.
#if defined(ATTN_TEST_FEW_TYPES)
using exact_types = std::tuple<float>;
#define ATTN_TEST_FOR_DOUBLE(compiled)
#else
using exact_types = std::tuple<float, double>;
#define ATTN_TEST_FOR_DOUBLE(compiled) template struct compiled<double>;
#endif
#if defined(ATTN_TEST_HALF)
using storage_types = std::tuple<Eigen::half, Eigen::bfloat16>;
#define ATTN_TEST_FOR_HALF(compiled) template struct compiled<Eigen::half>;
#else
using storage_types = std::tuple<Eigen::bfloat16>;
#define ATTN_TEST_FOR_HALF(compiled)
#endif
using widest_type = std::tuple_element_t<std::tuple_size_v<exact_types> - 1, exact_types>;
using all_types = decltype(std::tuple_cat(exact_types{}, storage_types{}));

// In call_*.cpp: instantiates a class template for each of all_types; for float where few operators are tested.
#if defined(ATTN_TEST_FLOAT_ALONE)
#define ATTN_TEST_FOR_ALL_TYPES(compiled) template struct compiled<float>
#else
#define ATTN_TEST_FOR_ALL_TYPES(compiled) \
  template struct compiled<float>;        \
  ATTN_TEST_FOR_DOUBLE(compiled)          \
  ATTN_TEST_FOR_HALF(compiled)            \
  template struct compiled<Eigen::bfloat16>
#endif

template <class S>
using real = attn::compute_type<S>;
template <class S>
using in_view = attn::tensor_view<const S>;
template <class S>
using out_view = attn::tensor_view<S>;
template <class S>
using score_of = std::function<real<S>(real<S>, attn::idx_t, attn::idx_t, attn::idx_t, attn::idx_t)>;
// (score, d, batch, head, i, j): d times the derivative of a score function by the score.
template <class S>
using score_backward_of = std::function<real<S>(real<S>, real<S>, attn::idx_t, attn::idx_t, attn::idx_t, attn::idx_t)>;

// Backward passes, compiled apart from the forward ones so that the two are compiled at the same time. S is one of
// all_types. An empty score means none.
template <class S>
struct compiled_full_softmax_backward {
  using gradients = attn::full_softmax_gradients<S>;
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out, const gradients&,
                       const attn::full_softmax_options<S>&, const score_of<S>&, const score_backward_of<S>&,
                       attn::execution&);
};

template <class S>
struct compiled_full_softmax : compiled_full_softmax_backward<S> {
  using options = attn::full_softmax_options<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&, const score_of<S>&,
                   attn::execution&);
  // The options that steps have, too.
  static void step(attn::kv_cache<S>&, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&,
                   const score_of<S>&, attn::execution&);
  using cached_options = attn::full_softmax_cached_options<S>;
  static void cached(const attn::kv_cache<S>&, in_view<S> q, out_view<S> out, const cached_options&, attn::execution&);
};

template <class S>
struct compiled_sliding_window_backward {
  using gradients = attn::sliding_window_gradients<S>;
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out, const gradients&,
                       const attn::sliding_window_options<S>&, const score_of<S>&, const score_backward_of<S>&,
                       attn::execution&);
};

template <class S>
struct compiled_sliding_window : compiled_sliding_window_backward<S> {
  using options = attn::sliding_window_options<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&, const score_of<S>&,
                   attn::execution&);
  static void step(attn::sliding_window_cache<S>&, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out,
                   const attn::sliding_window_step_options<S>&, const score_of<S>&, attn::execution&);
};

}  // namespace testing
