// latent_attention_backward against the reverse pass of its reference.
#include "layers/latent_attention.hpp"

namespace testing::latent_attention_backward_tests {
namespace {

// Keys, values and their gradients are rounded to 16 bits.
template <class S>
constexpr double factor = sizeof(S) == 2 ? 4 : 2;

template <class S>
void check(const latent_problem& given) {
  const latent_problem p = rounded<S>(given);
  check_layer_backward<S>(
      {case_of(p), [p](const auto& in, const auto& d_out, const auto& to, bool accumulate,
                       attn::execution& exec) { latent_gradients_of<S>(p, in, d_out, to, accumulate, exec); }},
      factor<S>);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("latent_attention_backward: against the reverse pass", "[latent_attention_backward]",
                        all_types) {
  for (auto form : {attn::latent_form::expanded, attn::latent_form::absorbed})
    for (idx_t rotary : {0, 4}) {
      latent_problem p = random_latent({.queries = 13, .keys = 20, .rotary = rotary});
      p.options.causal = true, p.options.sinks = {0.5, -0.25, 1}, p.form = form;
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("latent_attention_backward: lse with a gradient, bias, lengths",
                        "[latent_attention_backward]", exact_types) {
  using S = TestType;
  latent_problem p = random_latent({.queries = 9, .keys = 12});
  auto& o = p.options;
  o.causal = true, o.sinks = {0.5, -0.25, 1}, o.softcap = 2, o.bias = random_normal(9, 1, 3, 9, 12);
  o.query_lengths = {9, 5}, o.key_lengths = {12, 7};
  p = rounded<S>(p);
  for (bool save_lse : {true, false}) {
    const double most = factor<S> * product_gradient_tolerance<S>;
    check_gradients(case_of(p, true), most, [&](const tensors& inputs, const tensors& d) {
      std::vector<tensor<S>> in;
      for (const auto& x : inputs) in.push_back(cast<S>(x));
      auto all = in;
      std::vector<tensor<S>*> to;
      for (auto& g : all) to.push_back(&g);
      attn::execution serial;
      latent_gradients_of<S>(p, in, cast<S>(d[0]), to, false, serial, cast<S>(d[1]), save_lse);
      tensors gradients;
      for (const auto& g : all) gradients.push_back(cast<double>(g));
      return gradients;
    });
  }
  check_central_differences(case_of(random_latent({.batch = 1, .heads = 2, .queries = 5, .keys = 5})));
}

TEST_CASE("latent_attention_backward: heads of several groups add up", "[latent_attention_backward]") {
  const latent_problem p = random_latent({.batch = 1, .heads = 2, .queries = 1, .keys = 2048, .dim = 1025, .rotary = 3,
                                          .latent = 2, .value = 1027});
  latent_memory<float> m(p);
  attn::execution serial;
  m.run(serial);
  const tensor<float> d_out = cast<float>(random_normal(8, 1, 2, 1, 1027));
  tensor<float> together = m.latent, rotary = m.k_rotary, sum(1, 1, 2048, 2), rotary_sum(1, 1, 2048, 3);
  compiled_latent_attention<float>::backward(m.inputs(), view(std::as_const(m.out)), view(d_out),
                                             {.latent = view(together), .k_rotary = view(rotary)}, m.options, serial);
  auto options = m.options;
  for (idx_t h = 0; h < 2; ++h) {
    latent_inputs<float> x = m.inputs();
    x.q = x.q.slice(1, h, 1), x.q_rotary = x.q_rotary.slice(1, h, 1);
    x.w_key = x.w_key.slice(0, h, 1), x.w_value = x.w_value.slice(0, h, 1);
    options.lse = row_view(m.lse).slice(1, h, 1);
    compiled_latent_attention<float>::backward(
        x, view(std::as_const(m.out)).slice(1, h, 1), view(d_out).slice(1, h, 1),
        {.latent = view(sum), .k_rotary = view(rotary_sum), .accumulate = true}, options, serial);
  }
  CHECK(together == sum);
  CHECK(rotary == rotary_sum);
}

TEST_CASE("latent_attention_backward refuses what does not fit", "[latent_attention_backward]") {
  latent_memory<float> m(random_latent({}));
  tensor<float> dq = m.q, d_out = m.out, dw = m.w_key;
  const auto refused = [&](const attn::latent_attention_gradients<float>& g, const char* says) {
    attn::execution serial;
    const std::string text = refusal([&] {
      compiled_latent_attention<float>::backward(m.inputs(), view(std::as_const(m.out)), view(std::as_const(d_out)), g,
                                                 m.options, serial);
    });
    INFO(text);
    CHECK(well_formed(text, "latent_attention_backward"));
    CHECK(text.find(says) != std::string::npos);
  };
  refused({.q = view(dq).slice(2, 0, 19)}, "the gradient of q of the shape of q");
  refused({.w_key = weights_view(dw).slice(1, 0, 7)}, "the gradient of w_key of the shape of w_key");
  refused({.q = view(dq), .q_rotary = view(dq).slice(3, 0, 4)}, "separate memory");
  refused({.bias = attn::tensor_view<float>(dq.data.data(), {1, 1, 20, 20})}, "bias, since its gradient is asked for");
  refused({.sinks = attn::tensor_view<float, 1>(dq.data.data(), {3})}, "sinks, since its gradient is asked for");
}

}  // namespace testing::latent_attention_backward_tests
