// The laws for the gradients of the attention-free family: padding and unseen keys, independent heads, strides, scratch
// memory.
#include <algorithm>

#include "aft/gradients.hpp"

namespace testing {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// f(problem) for every operator, causal and not. Batch 2, heads 2.
template <class F>
void for_each_operator(const aft_shape& s, F&& f) {
  for (bool causal : {false, true}) {
    INFO("causal " << causal);
    const auto with = [&](auto p) {
      p.options.causal = causal;
      return p;
    };
    f(with(aft_problem<reference::aft_simple_options>(s)));
    auto full = with(aft_problem<reference::aft_full_options>(s));
    full.options.w = aft_biases(s, s.heads, s.length, s.length);
    f(full);
    auto local = with(aft_problem<reference::aft_local_options>(s));
    local.options.window = 20;
    for (bool band : {false, true}) {
      local.options.band = band;
      local.options.w = aft_biases(s, s.heads, s.length, band ? 39 : s.length);
      f(local);
    }
    auto conv = with(aft_problem<reference::aft_conv_options>(s));
    conv.options.w = aft_biases(s, s.heads, 1, 9);
    f(conv);
    if (causal || s.length % 10 != 0) continue;
    conv.options.columns = 10, conv.options.w = aft_biases(s, s.heads, 3, 5);
    f(conv);
  }
}

template <class S>
tensor<S> gradient_of_out(const tensor<double>& q) {
  return cast<S>(random_normal(99, q.batch(), q.heads(), q.length(), q.dim()));
}

template <class Options>
constexpr bool biased = !std::is_same_v<Options, reference::aft_simple_options>;

}  // namespace

TEMPLATE_LIST_TEST_CASE("aft backward: whatever lies in the padding changes nothing, and its gradient is 0",
                        "[aft_backward_properties]", all_types) {
  attn::execution serial;
  for_each_operator({.batch = 2, .heads = 2, .length = 130, .dim = 5}, [&](auto p) {
    p.options.lengths = {130, 71};
    auto d_out = gradient_of_out<TestType>(p.q);
    const auto clean = run_aft_backward<TestType>(p, d_out, serial);
    for (index h = 0; h < 2; ++h)
      for (index t = 71; t < 130; ++t)
        for (index d = 0; d < 5; ++d) {
          p.q(1, h, t, d) = p.k(1, h, t, d) = p.v(1, h, t, d) = nan;
          d_out(1, h, t, d) = static_cast<TestType>(nan);
          for (int n = 0; n < 3; ++n) CHECK(clean[static_cast<std::size_t>(n)](1, h, t, d) == TestType(0));
        }
    CHECK((run_aft_backward<TestType>(p, d_out, serial) == clean));
  });
}

TEMPLATE_LIST_TEST_CASE("aft backward: a batch of heads gives what each head alone gives", "[aft_backward_properties]",
                        all_types) {
  attn::execution serial;
  for_each_operator({.batch = 2, .heads = 2, .length = 130, .dim = 18, .keys = 30}, [&](auto p) {
    const auto d_out = gradient_of_out<TestType>(p.q);
    const auto all = run_aft_backward<TestType>(p, d_out, serial);
    for (index b = 0; b < 2; ++b)
      for (index h = 0; h < 2; ++h) {
        auto one = p;
        one.q = head(p.q, b, h), one.k = head(p.k, b, h), one.v = head(p.v, b, h);
        if constexpr (biased<decltype(p.options)>) one.options.w = head(p.options.w, 0, h);
        const auto alone = run_aft_backward<TestType>(one, head(d_out, b, h), serial);
        for (std::size_t n = 0; n < 3; ++n) CHECK((alone[n] == head(all[n], b, h)));
      }
  });
}

TEMPLATE_LIST_TEST_CASE("aft backward: a causal row changes no later key's gradient, a masked key no gradient",
                        "[aft_backward_properties]", exact_types) {
  attn::execution serial;
  const aft_shape shape{.batch = 1, .heads = 2, .length = 130, .dim = 5, .masked = 0};
  for_each_operator(shape, [&](auto p) {
    auto d_out = gradient_of_out<TestType>(p.q);
    if (p.options.causal) {
      const auto before = run_aft_backward<TestType>(p, d_out, serial);
      auto poisoned = d_out;
      for (index d = 0; d < 5; ++d) poisoned(0, 0, 60, d) = static_cast<TestType>(nan);
      const auto after = run_aft_backward<TestType>(p, poisoned, serial);
      for (std::size_t n = 1; n < 3; ++n)
        CHECK((rows(head(after[n], 0, 0), 61, 69) == rows(head(before[n], 0, 0), 61, 69)));
      for (std::size_t n = 0; n < 3; ++n) CHECK((head(after[n], 0, 1) == head(before[n], 0, 1)));
    }
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(p.options)>, reference::aft_full_options>) {
      for (index h = 0; h < 2; ++h)
        for (index t = 0; t < 130; ++t) p.options.w(0, h, t, 33) = -std::numeric_limits<double>::infinity();
      const auto clean = run_aft_backward<TestType>(p, d_out, serial);
      for (index h = 0; h < 2; ++h)
        for (index d = 0; d < 5; ++d) p.k(0, h, 33, d) = p.v(0, h, 33, d) = nan;
      const auto masked = run_aft_backward<TestType>(p, d_out, serial);
      CHECK((masked == clean));
      for (std::size_t n = 1; n < 3; ++n) CHECK(std::all_of(&masked[n](0, 1, 33, 0), &masked[n](0, 1, 33, 0) + 5,
                                                           [](TestType x) { return x == TestType(0); }));
    }
    // A key of -infinity masks its channel.
    p.k(0, 0, 7, 2) = -std::numeric_limits<double>::infinity();
    const auto clean = run_aft_backward<TestType>(p, d_out, serial);
    p.v(0, 0, 7, 2) = nan;
    const auto poisoned = run_aft_backward<TestType>(p, d_out, serial);
    CHECK((poisoned == clean));
    CHECK(all_finite(clean[1]));
    CHECK(clean[1](0, 0, 7, 2) == TestType(0));
    CHECK(clean[2](0, 0, 7, 2) == TestType(0));
  });
}

TEMPLATE_LIST_TEST_CASE("aft backward: any strides give the same gradients", "[aft_backward_properties]", all_types) {
  using S = TestType;
  const index b = 2, h = 2, l = 100, d = 18;
  const auto p = aft_problem<reference::aft_full_options>({.batch = b, .heads = h, .length = l, .dim = d});
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v), w = cast<S>(random_normal(3, 1, h, l, l)),
                  d_out = gradient_of_out<S>(p.q);
  // [dim, length, head, batch] in memory
  const auto turned = [](const tensor<S>& x) {
    tensor<S> y(x.dim(), x.length(), x.heads(), x.batch());
    for (index n0 = 0; n0 < x.batch(); ++n0)
      for (index n1 = 0; n1 < x.heads(); ++n1)
        for (index n2 = 0; n2 < x.length(); ++n2)
          for (index n3 = 0; n3 < x.dim(); ++n3) y(n3, n2, n1, n0) = x(n0, n1, n2, n3);
    return y;
  };
  const auto turned_view = [](auto& y) {
    using element = std::remove_pointer_t<decltype(y.data.data())>;
    return attn::tensor_view<element>(y.data.data(), {y.dim(), y.length(), y.heads(), y.batch()},
                                      {1, y.dim(), y.dim() * y.length(), y.dim() * y.length() * y.heads()});
  };
  for (bool causal : {false, true}) {
    attn::execution serial;
    tensor<S> to[4] = {q, k, v, w}, other[4] = {turned(q), turned(k), turned(v), turned(w)};
    const tensor<S> in[5] = {turned(q), turned(k), turned(v), turned(w), turned(d_out)};
    compiled_aft_full<S>::backward(view(q), view(k), view(v), view(w), view(d_out),
                                   {view(to[0]), view(to[1]), view(to[2]), view(to[3])}, {.causal = causal}, serial);
    compiled_aft_full<S>::backward(
        turned_view(in[0]), turned_view(in[1]), turned_view(in[2]), turned_view(in[3]), turned_view(in[4]),
        {turned_view(other[0]), turned_view(other[1]), turned_view(other[2]), turned_view(other[3])},
        {.causal = causal}, serial);
    for (int n = 0; n < 4; ++n) CHECK((other[n] == turned(to[n])));
    compiled_aft_simple<S>::backward(view(q), view(k), view(v), view(d_out), {view(to[0]), view(to[1]), view(to[2])},
                                     {.causal = causal}, serial);
    compiled_aft_simple<S>::backward(turned_view(in[0]), turned_view(in[1]), turned_view(in[2]), turned_view(in[4]),
                                     {turned_view(other[0]), turned_view(other[1]), turned_view(other[2])},
                                     {.causal = causal}, serial);
    for (int n = 0; n < 3; ++n) CHECK((other[n] == turned(to[n])));
  }
}

TEST_CASE("aft backward: scratch memory grows with the shape alone", "[aft_backward_properties]") {
  attn::execution serial;
  for (double keys : {1.0, 300.0}) {
    std::size_t largest = 0;
    for (int again = 0; again < 2; ++again)
      for_each_operator({.batch = 2, .heads = 2, .length = 130, .dim = 5, .keys = keys}, [&](const auto& p) {
        (void)run_aft_backward<float>(p, gradient_of_out<float>(p.q), serial);
        if (again == 0) largest = std::max(largest, serial.scratch_bytes());
        CHECK(serial.scratch_bytes() <= largest);
      });
  }
}

}  // namespace testing
