// Bad input of backward passes is refused on entry: std::invalid_argument in one sentence, no gradient touched.
#include "support/call_lsh.hpp"
#include "support/call_patterns.hpp"
#include "support/call_selected_keys.hpp"
#include "support/call_topk_blocks.hpp"
#include "support/refusals.hpp"

namespace testing::backward_refusals_tests {
namespace {

// A good call with every gradient that is of something given, to be made wrong in one place.
template <class Options, class Gradients, idx_t Keys = 9>
struct backward_inputs : call_inputs<Options, Keys> {
  tensor<float> d_out{2, 4, 6, 5, 0.5f}, dq{2, 4, 6, 8, 7}, dk{2, 2, Keys, 8, 7}, dv{2, 2, Keys, 5, 7},
      d_parameter{2, 4, 6, 9, 7};
  std::vector<float> slopes{1, 0.5f, 0, 2}, sinks{0, 1, 2, -1}, d_slopes{7, 7, 7, 7}, d_sinks{7, 7, 7, 7};
  in_view<float> d_out_view = view(std::as_const(d_out));
  Gradients g;

  backward_inputs() {
    g.q = view(dq), g.v = view(dv);
    if constexpr (requires { g.k; }) g.k = view(dk);
  }
  bool untouched() const {
    bool same = true;
    for (const auto* x : {&dq.data, &dk.data, &dv.data, &d_parameter.data, &d_slopes, &d_sinks})
      same = same && std::all_of(x->begin(), x->end(), [](float value) { return value == 7; });
    return same;
  }
};

// call(d, execution): refused, no gradient may have been written.
template <class Operator, class Inputs>
struct backward_form {
  using options = typename Operator::options;
  static void call(Inputs& d, attn::execution& exec) {
    try {
      Operator::backward(d.q_view, d.k_view, d.v_view, d.out_view_, d.d_out_view, d.g, d.options, {}, {}, exec);
    } catch (...) {
      CHECK(d.untouched());
      throw;
    }
  }
};

// What the forward call refuses too; only writing is what it may not do where something lies.
template <class Inputs>
std::vector<refused<Inputs>> forward_refusals() {
  std::vector<refused<Inputs>> list;
  for (const auto& one : common_refusals<Inputs>())
    if (std::string(one.says) != "overlap" && std::string(one.what) != "a negative extent") list.push_back(one);
  list.push_back({"negative extents", "-9", [](auto& d) {
                    d.k_view = {d.k.data.data(), {2, 2, -9, 8}}, d.v_view = {d.v.data.data(), {2, 2, -9, 5}};
                  }});
  return list;
}

template <class Inputs>
std::vector<refused<Inputs>> gradient_refusals() {
  std::vector<refused<Inputs>> list = {
      {"d_out of another batch", "d_out", [](auto& d) { d.d_out_view = d.shaped(1, 4, 6, 5); }},
      {"d_out of other heads", "d_out", [](auto& d) { d.d_out_view = d.d_out_view.slice(1, 0, 2); }},
      {"d_out of another length", "d_out", [](auto& d) { d.d_out_view = d.d_out_view.slice(2, 0, 5); }},
      {"d_out of another dim", "d_out", [](auto& d) { d.d_out_view = d.d_out_view.slice(3, 0, 4); }},
      {"no d_out", "d_out", [](auto& d) { d.d_out_view = {}; }},
      {"a null d_out", "null", [](auto& d) { d.d_out_view = null_view(2, 4, 6, 5); }},
      {"no out", "out", [](auto& d) { d.out_view_ = {}; }},
      {"d_lse of another length", "d_lse", [](auto& d) { d.g.d_lse = reshaped(d.other, 2, 4, 5); }},
      {"d_lse of the key heads", "d_lse", [](auto& d) { d.g.d_lse = reshaped(d.other, 2, 2, 6); }},
      {"a null d_lse", "null", [](auto& d) { d.g.d_lse = null_view(2, 4, 6); }},
      {"dq of another length", "the gradient of q", [](auto& d) { d.g.q = d.g.q.slice(2, 0, 5); }},
      {"dq of another batch", "the gradient of q", [](auto& d) { d.g.q = d.g.q.slice(0, 0, 1); }},
      {"dv of another dim", "the gradient of v", [](auto& d) { d.g.v = d.g.v.slice(3, 0, 4); }},
      {"dv of the query heads", "the gradient of v", [](auto& d) { d.g.v = reshaped(d.other, 2, 4, 9, 5); }},
      {"a null dq", "null", [](auto& d) { d.g.q = null_view(2, 4, 6, 8); }},
      {"dq in q", "overlap", [](auto& d) { d.g.q = view(d.q); }},
      {"dq in out", "overlap",
       [](auto& d) { d.q_view = reshaped(d.other, 2, 4, 6, 8), d.out_view_ = reshaped(d.dq, 2, 4, 6, 5); }},
      {"dq in d_out", "overlap", [](auto& d) { d.d_out_view = reshaped(d.dq.data.data() + 100, 2, 4, 6, 5); }},
      {"dv in v", "overlap", [](auto& d) { d.v_view = view(std::as_const(d.dv)); }},
      {"dv in lse", "overlap", [](auto& d) { d.options.lse = reshaped(d.dv, 2, 4, 6); }},
      {"dv in d_lse", "overlap", [](auto& d) { d.g.d_lse = reshaped(d.dv, 2, 4, 6); }},
      {"dq in dv", "overlap",
       [](auto& d) {
         d.g.v = {d.dq.data.data(), d.dv.extents};
       }},
      {"dq whose rows are one", "overlap", [](auto& d) { d.g.q = reshaped(d.dq, 2, 4, 6, 8).strided(192, 48, 0, 1); }},
      {"sinks that are not given", "sinks", [](auto& d) { d.g.sinks = d.d_sinks; }},
      {"too few gradients of sinks", "the gradient of sinks",
       [](auto& d) { d.options.sinks = d.sinks, d.g.sinks = reshaped(d.d_sinks.data(), 2); }},
      {"gradients of sinks in sinks", "overlap", [](auto& d) { d.options.sinks = d.sinks, d.g.sinks = d.sinks; }},
  };
  const auto add = [&list](std::vector<refused<Inputs>> more) { list.insert(list.end(), more.begin(), more.end()); };
  if constexpr (requires(Inputs & d) { d.g.k; })
    add({
        {"dk of another length", "the gradient of k", [](auto& d) { d.g.k = d.g.k.slice(2, 0, 8); }},
        {"dk of another dim", "the gradient of k", [](auto& d) { d.g.k = d.g.k.slice(3, 0, 7); }},
        {"dk in k", "overlap", [](auto& d) { d.g.k = view(d.k); }},
        {"dk in dq", "overlap",
         [](auto& d) {
           d.g.k = {d.dq.data.data(), d.dk.extents};
         }},
        {"dk in q", "overlap",
         [](auto& d) {
           d.g.k = {d.q.data.data() + 7, d.dk.extents};
         }},
    });
  if constexpr (requires(Inputs & d) { d.g.alibi_slopes; })
    add({
        {"slopes that are not given", "alibi_slopes", [](auto& d) { d.g.alibi_slopes = d.d_slopes; }},
        {"too few gradients of slopes", "the gradient of alibi_slopes",
         [](auto& d) { d.options.alibi_slopes = d.slopes, d.g.alibi_slopes = reshaped(d.d_slopes.data(), 3); }},
        {"one memory for slopes and sinks", "overlap",
         [](auto& d) {
           d.options.alibi_slopes = d.slopes, d.options.sinks = d.sinks;
           d.g.alibi_slopes = d.g.sinks = d.d_slopes;
         }},
    });
  if constexpr (requires(Inputs & d) { d.g.bias; })
    add({
        {"a bias that is not given", "bias", [](auto& d) { d.g.bias = reshaped(d.d_parameter, 1, 1, 6, 9); }},
        {"a gradient of another shape than the bias", "the gradient of bias",
         [](auto& d) { d.options.bias = d.shaped(1, 1, 6, 9), d.g.bias = reshaped(d.d_parameter, 1, 4, 6, 9); }},
        {"a gradient in the bias", "overlap",
         [](auto& d) {
           d.options.bias = d.shaped(1, 1, 6, 9), d.g.bias = {d.other.data.data() + 9, {1, 1, 6, 9}};
         }},
    });
  if constexpr (requires(Inputs & d) { d.g.relative_bias; })
    add({
        {"a relative bias that is not given", "relative_bias",
         [](auto& d) { d.g.relative_bias = {d.d_parameter.data.data(), {4, 9}}; }},
        {"a gradient of another shape than the relative bias", "the gradient of relative_bias",
         [](auto& d) {
           d.options.relative_bias = {d.other.data.data(), {1, 9}};
           d.g.relative_bias = {d.d_parameter.data.data(), {4, 9}};
         }},
    });
  if constexpr (requires(Inputs & d) { d.g.position_queries; })
    add({
        {"position queries that are not given", "position_queries",
         [](auto& d) { d.g.position_queries = {d.d_parameter.data.data(), {1, 3, 8}}; }},
        {"a gradient of another shape than the position queries", "the gradient of position_queries",
         [](auto& d) {
           d.options.position_queries = {d.other.data.data(), {1, 3, 8}};
           d.g.position_queries = {d.d_parameter.data.data(), {4, 3, 8}};
         }},
    });
  if constexpr (requires(Inputs & d) { d.g.log_decay; })
    add({
        {"log decays that are not given", "log_decay",
         [](auto& d) { d.g.log_decay = {d.d_parameter.data.data(), {2, 4, 9}}; }},
        {"a gradient of another shape than the log decays", "the gradient of log_decay",
         [](auto& d) {
           d.options.causal = true, d.options.log_decay = {d.other.data.data(), {2, 4, 9}};
           d.g.log_decay = {d.d_parameter.data.data(), {2, 4, 6}};
         }},
    });
  if constexpr (requires(Inputs & d) { d.g.q_global; }) {
    const auto own = [](auto& d) {
      d.options.q_global = d.shaped(2, 4, 6, 8), d.options.k_global = d.shaped(2, 2, 9, 8);
      d.options.v_global = d.shaped(2, 2, 9, 5);
    };
    add({
        {"q_global that is not given", "q_global", [](auto& d) { d.g.q_global = reshaped(d.d_parameter, 2, 4, 6, 8); }},
        {"a gradient of k_global of another length", "the gradient of k_global",
         [own](auto& d) { own(d), d.g.k_global = reshaped(d.d_parameter, 2, 2, 8, 8); }},
        {"a gradient in v_global", "overlap",
         [own](auto& d) { own(d), d.g.v_global = reshaped(d.other.data.data() + 3, 2, 2, 9, 5); }},
        {"one memory for k and k_global", "overlap", [own](auto& d) { own(d), d.g.k_global = view(d.dk); }},
    });
  }
  return list;
}

// A call with every gradient there is goes through; each of the list is refused.
template <class Operator>
void check_backward_refused(const std::string& name) {
  using inputs = backward_inputs<typename Operator::options, typename Operator::gradients>;
  auto list = forward_refusals<inputs>();
  const auto more = gradient_refusals<inputs>();
  list.insert(list.end(), more.begin(), more.end());
  check_refused<backward_form<Operator, inputs>, 9, inputs>(name, list);
}

struct everything {
  using options = attn::pattern_softmax_options<float>;
  using gradients = attn::pattern_softmax_gradients<float>;
  static void backward(in_view<float> q, in_view<float> k, in_view<float> v, in_view<float> out, in_view<float> d_out,
                       const gradients& g, const options& chosen, const score_of<float>& score,
                       const score_backward_of<float>& score_backward, attn::execution& execution) {
    const listed_pattern all{{{{-100, 100}, {{.range = {0, 100}}}}}};
    compiled_pattern_softmax<float>::backward(q, k, v, out, all, d_out, g, chosen, score, score_backward, execution);
  }
};

struct listed {
  using options = attn::selected_keys_options<float>;
  using gradients = attn::selected_keys_gradients<float>;
  static void backward(in_view<float> q, in_view<float> k, in_view<float> v, in_view<float> out, in_view<float> d_out,
                       const gradients& g, const options& chosen, const score_of<float>& score,
                       const score_backward_of<float>& score_backward, attn::execution& execution) {
    static const tensor<idx_t> lists(1, 1, 6, 2, 0);
    with_lists<options> all{chosen};
    all.indices = attn::tensor_view<const idx_t>(lists.data.data(), lists.extents);
    compiled_selected_keys<float>::backward(q, k, v, out, d_out, g, all, score, score_backward, execution);
  }
};

// Queries are keys: no k, no gradient of it.
struct hashed {
  using options = attn::lsh_options<float>;
  using gradients = attn::lsh_gradients<float>;
  static void backward(in_view<float> q, in_view<float>, in_view<float> v, in_view<float> out, in_view<float> d_out,
                       const gradients& g, options chosen, const score_of<float>& score,
                       const score_backward_of<float>& score_backward, attn::execution& execution) {
    chosen.rounds = 2, chosen.buckets = 4, chosen.chunk = 3;
    compiled_lsh<float>::backward(q, v, out, d_out, g, chosen, score, score_backward, execution);
  }
};

}  // namespace

TEST_CASE("full_softmax_backward refuses what does not fit", "[backward_refusals]") {
  check_backward_refused<compiled_full_softmax<float>>("full_softmax_backward");
}
TEST_CASE("sliding_window_backward refuses what does not fit", "[backward_refusals]") {
  check_backward_refused<compiled_sliding_window<float>>("sliding_window_backward");
}
TEST_CASE("block_backward refuses what does not fit", "[backward_refusals]") {
  check_backward_refused<compiled_block<float>>("block_backward");
}
TEST_CASE("strided_backward refuses what does not fit", "[backward_refusals]") {
  check_backward_refused<compiled_strided<float>>("strided_backward");
}
TEST_CASE("bigbird_backward refuses what does not fit", "[backward_refusals]") {
  check_backward_refused<compiled_bigbird<float>>("bigbird_backward");
}
TEST_CASE("topk_blocks_backward refuses what does not fit", "[backward_refusals]") {
  using form = compiled_topk_blocks<float>;
  check_backward_refused<form>("topk_blocks_backward");
  using inputs = backward_inputs<form::options, form::gradients>;
  check_refused<backward_form<form, inputs>, 9, inputs>(
      "topk_blocks_backward", {{"blocks of 0", "block >= 1; found 0", [](inputs& d) { d.options.block = 0; }},
                               {"no own block", "topk >= 1; found 0", [](inputs& d) { d.options.topk = 0; }}});
}
TEST_CASE("selected_keys_backward refuses what does not fit", "[backward_refusals]") {
  check_backward_refused<listed>("selected_keys_backward");
  using inputs = backward_inputs<listed::options, listed::gradients>;
  check_refused<backward_form<listed, inputs>, 9, inputs>(
      "selected_keys_backward", {{"blocks of 0", "block >= 1; found 0", [](inputs& d) { d.options.block = 0; }}});
}
TEST_CASE("pattern_softmax_backward refuses what does not fit", "[backward_refusals]") {
  check_backward_refused<everything>("pattern_softmax_backward");
}

TEST_CASE("lsh_backward refuses what does not fit", "[backward_refusals]") {
  using inputs = backward_inputs<hashed::options, hashed::gradients, 6>;
  std::vector<refused<inputs>> list;
  for (const auto& one : gradient_refusals<inputs>())
    if (std::string(one.what) != "dv of the query heads") list.push_back(one);
  list.push_back({"v of another length", "length", [](auto& d) { d.v_view = d.shaped(2, 2, 8, 5); }});
  list.push_back({"out of another dim", "dim", [](auto& d) { d.out_view_ = d.out_view_.slice(3, 0, 4); }});
  list.push_back({"too few lengths", "lengths", [](auto& d) { d.options.lengths = d.list(6); }});
  list.push_back({"a negative norm_eps", "norm_eps", [](auto& d) { d.options.norm_eps = -1; }});
  check_refused<backward_form<hashed, inputs>, 6, inputs>("lsh_backward", list);
}

}  // namespace testing::backward_refusals_tests
