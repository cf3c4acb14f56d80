// The attention-free family with a mask of keys, against the references: hidden keys add nothing, whatever they are, to
// results, gradients and states.
#include "aft/gradients.hpp"
#include "support/key_masks.hpp"
#include "support/refusal.hpp"

namespace testing::aft_key_mask_tests {
namespace {

// f(problem) for all operators, causal and not.
template <class F>
void each_form(const aft_shape& s, F&& f) {
  const auto both = [&](auto p, const char* name) {
    for (bool causal : {false, true}) {
      if constexpr (requires { p.options.columns; })
        if (causal && p.options.columns > 0) continue;
      p.options.causal = causal, p.options.gate = !causal || s.length % 2;
      CAPTURE(name, causal);
      f(p);
    }
  };
  both(aft_problem<reference::aft_simple_options>(s), "simple");
  auto full = aft_problem<reference::aft_full_options>(s);
  full.options.w = aft_biases(s, 1, s.length, s.length);
  both(full, "full");
  auto local = aft_problem<reference::aft_local_options>(s);
  local.options.w = aft_biases(s, s.heads, s.length, 2 * 9 - 1), local.options.window = 9, local.options.band = true;
  both(local, "local");
  auto conv = aft_problem<reference::aft_conv_options>(s);
  conv.options.w = aft_biases(s, s.heads, 1, 15);
  both(conv, "conv");
  conv.k = tensor<double>(s.batch, s.heads, s.length, 1);
  spread(conv.k, s.keys, s.seed + 2);
  conv.options.w = aft_biases(s, 1, 3, 5), conv.options.columns = s.length / 10;
  both(conv, "image of one key a head");
}

template <class S>
void check_forward(const auto& problem) {
  const auto p = rounded_aft<S>(problem);
  CHECK(aft_error<S>(p) <= tolerance<S>::out);
  attn::execution serial, threads(3, 0);
  const tensor<double> out = run_aft<S>(p, serial);
  for (double value : poisons) CHECK(run_aft<S>(with_poison(p, value), serial) == out);
  CHECK(run_aft<S>(p, threads) == out);
}

template <class S>
void check_gradients_of(const auto& problem) {
  const auto p = rounded_aft<S>(problem);
  check_aft_gradients<S>(p);
  check_aft_gradient_bits<S>(p);
  attn::execution serial;
  const tensor<S> d_out = cast<S>(random_normal(99, p.q.batch(), p.q.heads(), p.q.length(), p.q.dim()));
  const auto all = run_aft_backward<S>(p, d_out, serial);
  for (double value : poisons) CHECK((run_aft_backward<S>(with_poison(p, value), d_out, serial) == all));
  for (std::size_t n : {1u, 2u})
    CHECK(with_hidden(cast<double>(all[n]), p.options.key_mask, 0) == cast<double>(all[n]));
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("key_mask: aft, whatever hidden keys are", "[aft_key_mask]", all_types) {
  for (double size : {1.0, 100.0})
    for (int kind = 0; kind < key_mask_count; ++kind)
      each_form({.heads = 2, .length = 230, .dim = 20, .keys = size, .biases = 3 * size}, [&](auto p) {
        CAPTURE(size, kind);
        p.options.key_mask = key_mask_of(kind, 2, 230);
        if (kind == 1) p.options.lengths = {230, 213};
        check_forward<TestType>(p);
      });
}

TEMPLATE_LIST_TEST_CASE("key_mask: gradients of aft", "[aft_key_mask]", exact_types) {
  for (double size : {1.0, 30.0})
    for (int kind = 0; kind < key_mask_count; ++kind)
      each_form({.heads = 2, .length = 130, .dim = 3, .keys = size, .biases = size}, [&](auto p) {
        CAPTURE(size, kind);
        if (kind == 4 && size > 1) return;  // one key alone: all terms of dk and dw cancel
        p.options.key_mask = key_mask_of(kind, 2, 130);
        if (kind == 1) p.options.lengths = {130, 101};
        check_gradients_of<TestType>(p);
      });
}

TEST_CASE("key_mask: a mask that hides nothing changes no bit of aft", "[aft_key_mask]") {
  each_form({.heads = 2, .length = 600, .dim = 5}, [&](auto p) {
    attn::execution serial;
    auto masked = p;
    masked.options.key_mask = tensor<double>(1, 1, 1, 600, 1);
    CHECK(run_aft<float>(masked, serial) == run_aft<float>(p, serial));
    const tensor<float> d_out = cast<float>(random_normal(99, 2, 2, 600, 5));
    CHECK((run_aft_backward<float>(masked, d_out, serial) == run_aft_backward<float>(p, d_out, serial)));
  });
}

TEMPLATE_LIST_TEST_CASE("key_mask: aft token by token, in chunks and all at once agree", "[aft_key_mask]",
                        exact_types) {
  using S = TestType;
  attn::execution serial;
  constexpr idx_t length = 150;
  for (int kind = 0; kind < key_mask_count; ++kind)
    each_form({.heads = 2, .length = length, .dim = 5}, [&](auto p) {
      if (!p.options.causal) return;
      using options = decltype(p.options);
      p.options.key_mask = key_mask_of(kind, 2, length), p.options.gate = true;
      p = rounded_aft<S>(p);
      const tensor<double> wanted = expected(p);
      p = with_poison(p);
      const key_mask_bytes seen(p.options.key_mask);
      const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v);
      tensor<S> w;
      if constexpr (!std::is_same_v<options, reference::aft_simple_options>) w = cast<S>(p.options.w);
      for (const auto& chunks : {std::vector<idx_t>(length, 1), {70, 2, 78}, {1, 149}}) {
        tensor<S> out(2, 2, length, 5);
        const auto feed = [&](auto& state, const auto& append, const auto& step) {
          idx_t begin = 0;
          for (idx_t count : chunks) {
            const auto part = [&](const auto& x) { return view(x).slice(2, begin, count); };
            if (begin == 0)
              append(state, part(k), part(v), count);
            else
              step(state, part(q), part(k), part(v), view(out).slice(2, begin, count), seen.view(begin, count));
            begin += count;
          }
        };
        const auto append = [&](auto& state, auto keys, auto values, idx_t count) {
          state.append(keys, values, {.key_mask = seen.view(0, count)});
        };
        if constexpr (std::is_same_v<options, reference::aft_simple_options>) {
          attn::aft_simple_state<S> state({.batch = 2, .heads = 2, .dim = 5});
          feed(state, append, [&](auto& s, auto a, auto b, auto c, auto to, auto mask) {
            compiled_aft_simple<S>::step(s, a, b, c, to, {.key_mask = mask}, serial);
          });
        } else if constexpr (std::is_same_v<options, reference::aft_full_options>) {
          attn::kv_cache<S> cache({.batch = 2, .heads = 2, .dim = 5});
          feed(cache, [](auto& s, auto keys, auto values, idx_t) { s.append(keys, values); },
               [&](auto& s, auto a, auto b, auto c, auto to, auto) {
                 const auto all = seen.view(0, s.tokens() + a.extent(2));
                 compiled_aft_full<S>::step(s, a, b, c, to, view(std::as_const(w)), {.key_mask = all}, serial);
               });
        } else if constexpr (std::is_same_v<options, reference::aft_local_options>) {
          attn::aft_local_state<S> state({.batch = 2, .heads = 2, .dim = 5}, {.window = 9});
          feed(state, append, [&](auto& s, auto a, auto b, auto c, auto to, auto mask) {
            compiled_aft_local<S>::step(s, a, b, c, to, view(std::as_const(w)), {.band = true, .key_mask = mask},
                                        serial);
          });
        } else {
          attn::aft_conv_state<S> state({.batch = 2, .heads = 2, .dim = 5}, {.width = 15});
          feed(state, append, [&](auto& s, auto a, auto b, auto c, auto to, auto mask) {
            compiled_aft_conv<S>::step(s, a, b, c, to, kernel_view(std::as_const(w), false), {.key_mask = mask},
                                       serial);
          });
        }
        CAPTURE(kind);
        const idx_t rest = length - chunks[0];
        CHECK(relative_error(rows(out, chunks[0], rest), rows(wanted, chunks[0], rest)) <= tolerance<S>::out);
      }
    });
}

TEST_CASE("key_mask: aft refuses one that does not fit", "[aft_key_mask][refusals]") {
  const tensor<float> x(2, 2, 6, 3, 0.5f), w(1, 2, 6, 6, 0.5f);
  tensor<float> out(2, 2, 6, 3, 7), gradient = out;
  const tensor<std::uint8_t> bytes(1, 1, 9, 9, 1);
  attn::execution serial;
  const attn::state_extents extents{.batch = 2, .heads = 2, .dim = 3};
  attn::aft_simple_state<float> sums(extents);
  attn::aft_local_state<float> window(extents, {.window = 2});
  attn::aft_conv_state<float> past(extents, {.width = 5});
  attn::kv_cache<float> cache(extents);
  const in_view<float> in = view(x), square = view(w), kernels(w.data.data(), {1, 1, 2, 5}, {0, 0, 36, 1});
  const struct {
    idx_t batch, keys;
    bool is_null;
    const char* says;
  } wrong[] = {{3, 6, false, "key_mask batch"},
               {1, 5, false, "key_mask length = key length 6; found 5"},
               {2, 6, true, "null"}};
  for (const auto& mask : wrong) {
    const attn::tensor_view<const std::uint8_t, 2> seen(mask.is_null ? nullptr : bytes.data.data(),
                                                        {mask.batch, mask.keys});
    const out_view<float> to = view(out), dk = view(gradient);
    const std::pair<const char*, std::function<void()>> calls[] = {
        {"aft_simple", [&] { compiled_aft_simple<float>::call(in, in, in, to, {.key_mask = seen}, serial); }},
        {"aft_full", [&] { compiled_aft_full<float>::call(in, in, in, to, square, {.key_mask = seen}, serial); }},
        {"aft_local", [&] { compiled_aft_local<float>::call(in, in, in, to, square, {.key_mask = seen}, serial); }},
        {"aft_conv", [&] { compiled_aft_conv<float>::call(in, in, in, to, kernels, {.key_mask = seen}, serial); }},
        {"aft_simple_backward",
         [&] { compiled_aft_simple<float>::backward(in, in, in, in, {.k = dk}, {.key_mask = seen}, serial); }},
        {"aft_full_backward",
         [&] { compiled_aft_full<float>::backward(in, in, in, square, in, {.k = dk}, {.key_mask = seen}, serial); }},
        {"aft_local_backward",
         [&] { compiled_aft_local<float>::backward(in, in, in, square, in, {.k = dk}, {.key_mask = seen}, serial); }},
        {"aft_conv_backward",
         [&] { compiled_aft_conv<float>::backward(in, in, in, kernels, in, {.k = dk}, {.key_mask = seen}, serial); }},
        {"aft_simple_step",
         [&] { compiled_aft_simple<float>::step(sums, in, in, in, to, {.key_mask = seen}, serial); }},
        {"aft_full_step",
         [&] { compiled_aft_full<float>::step(cache, in, in, in, to, square, {.key_mask = seen}, serial); }},
        {"aft_local_step",
         [&] { compiled_aft_local<float>::step(window, in, in, in, to, square, {.key_mask = seen}, serial); }},
        {"aft_conv_step",
         [&] { compiled_aft_conv<float>::step(past, in, in, in, to, kernels, {.key_mask = seen}, serial); }},
        {"aft_simple_state", [&] { sums.append(in, in, {.key_mask = seen}); }},
        {"aft_local_state", [&] { window.append(in, in, {.key_mask = seen}); }},
        {"aft_conv_state", [&] { past.append(in, in, {.key_mask = seen}); }}};
    for (const auto& [name, call] : calls) {
      const std::string message = refusal(call);
      INFO(name << ": " << message);
      CHECK(well_formed(message, name));
      CHECK(message.find(mask.says) != std::string::npos);
      CHECK((sums.tokens() == 0 && window.tokens() == 0 && past.tokens() == 0 && cache.tokens() == 0));
      for (const auto* x_out : {&out, &gradient})
        CHECK(std::all_of(x_out->data.begin(), x_out->data.end(), [](float value) { return value == 7; }));
    }
  }
}

}  // namespace testing::aft_key_mask_tests
