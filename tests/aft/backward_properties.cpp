// What holds for the gradients of the attention-free family beside the laws (laws/gradients_*.cpp): masked keys,
// strides of biases, scratch memory.
#include <algorithm>

#include "aft/gradients.hpp"

namespace testing::backward_properties_tests {
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

}  // namespace

TEMPLATE_LIST_TEST_CASE("aft backward: what lies in a masked key changes nothing, and its gradient is 0",
                        "[aft_backward_properties]", exact_types) {
  using T = TestType;
  attn::execution serial;
  const auto is_zero = [](T x) { return x == T(0); };
  const aft_shape shape{.batch = 1, .heads = 2, .length = 130, .dim = 5, .masked = 0};
  for_each_operator(shape, [&](auto p) {
    const auto d_out = cast<T>(random_normal(99, 1, 2, 130, 5));
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(p.options)>, reference::aft_full_options>) {
      for (idx_t h = 0; h < 2; ++h)
        for (idx_t t = 0; t < 130; ++t) p.options.w(0, h, t, 33) = -std::numeric_limits<double>::infinity();
      const auto clean = run_aft_backward<T>(p, d_out, serial);
      for (idx_t h = 0; h < 2; ++h)
        for (idx_t d = 0; d < 5; ++d) p.k(0, h, 33, d) = p.v(0, h, 33, d) = nan;
      const auto masked = run_aft_backward<T>(p, d_out, serial);
      CHECK((masked == clean));
      for (std::size_t n = 1; n < 3; ++n)
        CHECK(std::all_of(&masked[n](0, 1, 33, 0), &masked[n](0, 1, 33, 0) + 5, is_zero));
    }
    // A key of -infinity masks its channel.
    p.k(0, 0, 7, 2) = -std::numeric_limits<double>::infinity();
    const auto clean = run_aft_backward<T>(p, d_out, serial);
    p.v(0, 0, 7, 2) = nan;
    CHECK((run_aft_backward<T>(p, d_out, serial) == clean));
    CHECK(all_finite(clean[1]));
    CHECK(is_zero(clean[1](0, 0, 7, 2)));
    CHECK(is_zero(clean[2](0, 0, 7, 2)));
  });
}

TEMPLATE_LIST_TEST_CASE("aft backward: what has no channels has a gradient of 0", "[aft_backward_properties]",
                        exact_types) {
  using T = TestType;
  attn::execution serial;  // whose scratch memory holds NaN
  for_each_operator({.length = 50}, [&](auto p) {
    std::fill(p.k.data.begin(), p.k.data.end(), nan);
    (void)run_aft_backward<T>(p, cast<T>(p.q), serial);
  });
  for_each_operator({.length = 50, .dim = 0}, [&](auto p) {
    const auto check = [&] {
      for (const auto& x : run_aft_backward<T>(p, cast<T>(p.q), serial))
        CHECK(std::all_of(x.data.begin(), x.data.end(), [](T value) { return value == T(0); }));
    };
    check();
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(p.options)>, reference::aft_conv_options>) {
      p.k = tensor<double>(p.q.batch(), p.q.heads(), p.q.length(), 1, 1.0);  // one for all channels
      check();
    }
  });
}

// Of the biases; those of the rest are a law for all operators.
TEMPLATE_LIST_TEST_CASE("aft backward: biases of any strides", "[aft_backward_properties]", all_types) {
  using S = TestType;
  const idx_t b = 2, h = 2, l = 100, d = 18;
  const auto p = aft_problem<reference::aft_full_options>({.batch = b, .heads = h, .length = l, .dim = d});
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v), w = cast<S>(random_normal(3, 1, h, l, l)),
                  d_out = cast<S>(random_normal(99, b, h, l, d));
  // [key, row, head] in memory
  tensor<S> turned(1, l, l, h), d_turned = turned, dw = w;
  const auto turned_view = [=](auto* data) {
    return attn::tensor_view<std::remove_pointer_t<decltype(data)>>(data, {1, h, l, l}, {l * l * h, 1, h, l * h});
  };
  const auto of_turned = turned_view(turned.data.data());
  for (idx_t n = 0; n < h; ++n)
    for (idx_t t = 0; t < l; ++t)
      for (idx_t j = 0; j < l; ++j) of_turned(0, n, t, j) = w(0, n, t, j);
  for (bool causal : {false, true}) {
    attn::execution serial;
    compiled_aft_full<S>::backward(view(q), view(k), view(v), view(w), view(d_out), {.w = view(dw)}, {.causal = causal},
                                   serial);
    const auto other = turned_view(d_turned.data.data());
    compiled_aft_full<S>::backward(view(q), view(k), view(v), of_turned, view(d_out), {.w = other}, {.causal = causal},
                                   serial);
    bool same = true;
    for (idx_t n = 0; n < h; ++n)
      for (idx_t t = 0; t < l; ++t)
        for (idx_t j = 0; j < l; ++j) same = same && other(0, n, t, j) == dw(0, n, t, j);
    CHECK(same);
  }
}

// A NaN in d_out reaches the keys its row sees, and no others.
TEMPLATE_LIST_TEST_CASE("aft_simple_backward: a masked key gets nothing of a NaN", "[aft_backward_properties]",
                        all_types) {
  using S = TestType;
  tensor<S> q = cast<S>(random_normal(1, 1, 1, 3, 9)), k = q, v = q, d_out = q, dk(1, 1, 3, 9, S(7)), dv = dk, dq = dk;
  for (idx_t d = 0; d < 9; ++d) k(0, 0, 1, d) = -std::numeric_limits<S>::infinity();
  d_out(0, 0, 0, 4) = std::numeric_limits<S>::quiet_NaN();
  for (bool causal : {false, true}) {
    attn::execution serial;
    compiled_aft_simple<S>::backward(view(q), view(k), view(v), view(d_out),
                                     {.q = view(dq), .k = view(dk), .v = view(dv)}, {.causal = causal}, serial);
    for (idx_t d = 0; d < 9; ++d) {
      CHECK(static_cast<double>(dk(0, 0, 1, d)) == 0);
      CHECK(static_cast<double>(dv(0, 0, 1, d)) == 0);
    }
    CHECK(std::isnan(static_cast<double>(dv(0, 0, 0, 4))));
  }
}

TEST_CASE("aft backward: scratch memory grows with the shape alone", "[aft_backward_properties]") {
  attn::execution serial;
  const auto d_out = cast<float>(random_normal(99, 2, 2, 130, 5));
  for (double keys : {1.0, 300.0}) {
    std::size_t largest = 0;
    for (int again = 0; again < 2; ++again)
      for_each_operator({.batch = 2, .heads = 2, .length = 130, .dim = 5, .keys = keys}, [&](const auto& p) {
        (void)run_aft_backward<float>(p, d_out, serial);
        if (again == 0) largest = std::max(largest, serial.scratch_bytes());
        CHECK(serial.scratch_bytes() <= largest);
      });
  }
}

}  // namespace testing::backward_properties_tests
