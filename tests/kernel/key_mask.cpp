// performer and rfa with a mask of keys, against their references: hidden keys add nothing, whatever they are, to
// results, gradients and states; maxima and the mean key are those of the keys that are seen.
#include "support/gradient_kernel.hpp"
#include "support/key_masks.hpp"
#include "support/refusal.hpp"

namespace testing::kernel_key_mask_tests {
namespace {

using reference::performer_kernel;

constexpr performer_kernel kernels[] = {performer_kernel::positive, performer_kernel::hyperbolic,
                                        performer_kernel::trigonometric, performer_kernel::relu};

performer_problem performer_of(const problem_shape& shape, performer_kernel kernel, idx_t matrices = 1) {
  auto p = random_problem<performer_problem>(shape, 1);
  for (tensor<double>* x : {&p.q, &p.k})
    for (double& value : x->data) value *= kernel == performer_kernel::trigonometric ? 0.4 : 1;
  p.options.kernel = kernel;
  p.options.features = random_normal(101, 1, matrices, 7, shape.dim);
  p.options.scale = 0.25;
  return p;
}
rfa_problem rfa_of(const problem_shape& shape, idx_t matrices = 1) {
  auto p = random_problem<rfa_problem>(shape, 1);
  p.options.features = random_normal(101, 1, matrices, 7, shape.dim, 0.5);
  return p;
}

template <class S, class Problem>
void check_forward(const Problem& problem) {
  const Problem p = rounded<S>(problem);
  CHECK(error_over_terms<S>(p) <= 4 * tolerance<S>::out);
  const tensor<double> out = run_serially<S>(p).out;
  for (double value : poisons) CHECK(run_serially<S>(with_poison(p, value)).out == out);
  attn::execution threads(3, 0);
  CHECK(run<S>(p, threads).out == out);
}

template <class S, class Problem>
void check_gradients_of(const Problem& problem, double factor) {
  const Problem p = rounded<S>(problem);
  check_backward<S>(p, factor);
  const tensor<double> d_out = rounded<S>(random_normal(99, p.q.batch(), p.q.heads(), p.q.length(), p.v.dim()));
  const tensors all = gradients_by<S>(p, d_out);
  for (double value : poisons) CHECK(gradients_by<S>(with_poison(p, value), d_out) == all);
  for (std::size_t n : {1u, 2u}) CHECK(with_hidden(all[n], p.options.key_mask, 0) == all[n]);
  attn::execution threads(3, 0);
  CHECK(gradients_by<S>(p, d_out, threads) == all);
  asked alone{.of = {false, false, true, false, false}};
  CHECK(gradients_by<S>(with_poison(p), d_out, alone)[2] == all[2]);
}

// f(problem, factor of the gradients' tolerance) for all forms of both.
template <class F>
void each_form(const problem_shape& shape, F&& f) {
  for (auto kernel : kernels)
    for (int form = 0; form < 5; ++form) {  // causal; plain, with a mean key, a maximum over all keys, both
      if (form > 2 && kernel != performer_kernel::positive) continue;
      performer_problem p = performer_of(shape, kernel, form == 1 ? shape.heads : 1);
      p.options.causal = form == 0;
      p.options.center_keys = form == 2 || form == 4;
      if (form > 2) p.options.feature_eps = 0x1p-6;
      if (form == 1) p.options.eps = 0.125;
      CAPTURE(int(kernel), form);
      f(p, kernel == performer_kernel::trigonometric ? 20 : 2);
    }
  for (int form = 0; form < 4; ++form) {
    rfa_problem p = rfa_of(shape, form == 1 ? shape.kv_heads : 1);
    p.options.causal = form > 0;
    if (form > 1) p.options.gate = random_gates(shape.batch, form == 2 ? shape.kv_heads : shape.heads, shape.keys);
    p.options.norm_eps = 0.125, p.options.eps = form == 3 ? 0 : 0.5;
    CAPTURE(form);
    f(p, 20.0);
  }
}


}  // namespace

TEMPLATE_LIST_TEST_CASE("key_mask: performer and rfa, whatever hidden keys are", "[kernel_key_mask]", all_types) {
  for (int kind = 0; kind < key_mask_count; ++kind)
    each_form({.queries = 150, .keys = 150, .dim = 5, .value_dim = 3}, [&](auto p, double) {
      CAPTURE(kind);
      p.options.key_mask = key_mask_of(kind, 2, 150);
      if (kind == 1) p.options.query_lengths = {150, 140}, p.options.key_lengths = {150, 133};
      if (std::is_same_v<TestType, float> || std::is_same_v<TestType, double> || kind < 2) check_forward<TestType>(p);
    });
}

TEMPLATE_LIST_TEST_CASE("key_mask: gradients of performer and rfa", "[kernel_key_mask]", exact_types) {
  for (int kind = 0; kind < key_mask_count; ++kind)
    each_form({.queries = 140, .keys = 140, .dim = 5, .value_dim = 3}, [&](auto p, double factor) {
      CAPTURE(kind);
      p.options.key_mask = key_mask_of(kind, 2, 140);
      if (kind == 1) p.options.query_lengths = {140, 130}, p.options.key_lengths = {140, 133};
      check_gradients_of<TestType>(p, factor);
    });
}

TEST_CASE("key_mask: gradients of 16-bit elements, whatever hidden keys are", "[kernel_key_mask]") {
  each_form({.queries = 140, .keys = 140, .dim = 17, .value_dim = 7}, [&](auto p, double) {
    p.options.key_mask = key_mask_of(1, 2, 140);
    p = rounded<Eigen::bfloat16>(p);
    const auto d_out = rounded<Eigen::bfloat16>(random_normal(99, 2, 4, 140, 7));
    const tensors all = gradients_by<Eigen::bfloat16>(p, d_out);
    CHECK(gradients_by<Eigen::bfloat16>(with_poison(p), d_out) == all);
    for (std::size_t n : {1u, 2u}) CHECK(with_hidden(all[n], p.options.key_mask, 0) == all[n]);
  });
}

TEST_CASE("key_mask: several segments, and threads that share a head", "[kernel_key_mask]") {
  each_form({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 1100, .keys = 2200, .dim = 2, .value_dim = 2},
            [&](auto p, double) {
              p.options.key_mask = key_mask_of(0, 1, 2200);
              for (idx_t t = 0; t < 1200; ++t) p.options.key_mask(0, 0, 0, t) = t % 2;
              p = rounded<float>(p);
              check_forward<float>(p);
              const auto d_out = random_normal(99, 1, 1, 1100, 2);
              attn::execution threads(3, 0);
              for (bool of_keys : {false, true}) {
                const asked shared{.of = {true, of_keys, of_keys, false, false}};
                const tensors all = gradients_by<float>(p, d_out, shared);
                CHECK(gradients_by<float>(p, d_out, threads, shared) == all);
                CHECK(gradients_by<float>(with_poison(p), d_out, threads, shared) == all);
              }
            });
}

TEST_CASE("key_mask: a mask that hides nothing changes no bit", "[kernel_key_mask]") {
  each_form({.queries = 140, .keys = 140, .dim = 5, .value_dim = 3}, [&](auto p, double) {
    p = rounded<float>(p);
    auto masked = p;
    masked.options.key_mask = tensor<double>(1, 1, 1, 140, 1);
    CHECK(run_serially<float>(masked).out == run_serially<float>(p).out);
    const auto d_out = random_normal(99, 2, 4, 140, 3);
    CHECK(gradients_by<float>(masked, d_out) == gradients_by<float>(p, d_out));
  });
}

TEST_CASE("key_mask: a NaN in a key that is seen reaches no gradient of a hidden one", "[kernel_key_mask]") {
  each_form({.queries = 70, .keys = 70, .dim = 5, .value_dim = 3}, [&](auto p, double) {
    p.options.key_mask = key_mask_of(0, 1, 70);
    p.options.key_mask(0, 0, 0, 0) = 1;
    for (idx_t d = 0; d < 5; ++d) p.k(0, 0, 0, d) = poisons[0];
    const tensors all = gradients_by<float>(p, random_normal(99, 2, 4, 70, 3));
    for (std::size_t n : {1u, 2u})
      for (idx_t t = 0; t < 70; ++t)
        for (idx_t d = 0; d < all[n].dim() && reference::key_hidden(p.options.key_mask, 0, t); ++d)
          CHECK(all[n](0, 0, t, d) == 0);
  });
}

namespace {

// In chunks; the first is appended without queries.
template <class S, class State, class Append, class Step>
tensor<double> streamed(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v, State state,
                        const std::vector<idx_t>& chunks, const Append& append, const Step& step) {
  const tensor<S> q_s = cast<S>(q), k_s = cast<S>(k), v_s = cast<S>(v);
  tensor<S> out(q.batch(), q.heads(), q.length(), v.dim());
  idx_t begin = 0;
  for (idx_t count : chunks) {
    const auto part = [&](auto x) { return x.slice(2, begin, count); };
    if (begin == 0)
      append(state, part(view(k_s)), part(view(v_s)), count);
    else
      step(state, part(view(q_s)), part(view(k_s)), part(view(v_s)), part(view(out)), begin, count);
    begin += count;
  }
  return rows(cast<double>(out), chunks[0], q.length() - chunks[0]);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("key_mask: token by token, in chunks and all at once agree", "[kernel_key_mask]", exact_types) {
  using S = TestType;
  attn::execution serial;
  for (int kind = 0; kind < key_mask_count; ++kind)
    each_form({.queries = 150, .keys = 150, .dim = 5, .value_dim = 3}, [&](auto p, double) {
      if (!p.options.causal) return;
      CAPTURE(kind);
      p.options.key_mask = key_mask_of(kind, 2, 150);
      p = rounded<S>(p);
      tensor<double> terms;
      auto measured = p;
      measured.options.terms = &terms;
      const tensor<double> wanted = expected(measured).out;
      p = with_poison(p);
      const key_mask_bytes seen(p.options.key_mask);
      const tensor<S> w = cast<S>(p.options.features), gate = cast<S>(p.options.gate);
      for (const auto& chunks : {std::vector<idx_t>(150, 1), {70, 2, 78}, {1, 149}}) {
        tensor<double> out;
        const auto set = [&](auto options, idx_t begin, idx_t count) {
          options.eps = static_cast<S>(p.options.eps), options.key_mask = seen.view(begin, count);
          if constexpr (requires { options.scale; }) options.scale = S(0.25);
          if constexpr (requires { options.gate; }) {
            options.norm_eps = S(0.125);
            if (!gate.empty()) options.gate = gate_view(gate).slice(2, begin, count);
          }
          return options;
        };
        const idx_t heads = std::max({idx_t(2), w.heads(), gate.heads()});
        if constexpr (std::is_same_v<decltype(p), performer_problem>)
          out = streamed<S>(
              p.q, p.k, p.v,
              attn::performer_state<S>({.batch = 2, .heads = heads, .features = 7, .value_dim = 3},
                                       {.kernel = static_cast<attn::performer_kernel>(p.options.kernel)}),
              chunks,
              [&](auto& state, auto k, auto v, idx_t count) {
                state.append(k, v, features_of(w), set(attn::performer_step_options<S>{}, 0, count));
              },
              [&](auto& state, auto q, auto k, auto v, auto to, idx_t begin, idx_t count) {
                compiled_performer<S>::step(state, q, k, v, to, features_of(w),
                                            set(attn::performer_step_options<S>{}, begin, count), serial);
              });
        else
          out = streamed<S>(
              p.q, p.k, p.v, attn::rfa_state<S>({.batch = 2, .heads = heads, .features = 7, .value_dim = 3}), chunks,
              [&](auto& state, auto k, auto v, idx_t count) {
                state.append(k, v, features_of(w), set(attn::rfa_step_options<S>{}, 0, count));
              },
              [&](auto& state, auto q, auto k, auto v, auto to, idx_t begin, idx_t count) {
                compiled_rfa<S>::step(state, q, k, v, to, features_of(w),
                                      set(attn::rfa_step_options<S>{}, begin, count), serial);
              });
        const idx_t rest = 150 - chunks[0];
        const tensor<double> of_rest = rows(wanted, chunks[0], rest), size = rows(terms, chunks[0], rest);
        double difference = 0, norm = 0;
        for (std::size_t n = 0; n < out.data.size(); ++n)
          difference += std::pow(out.data[n] - of_rest.data[n], 2), norm += std::pow(size.data[n], 2);
        CHECK(std::sqrt(difference) <= 4 * tolerance<S>::out * std::sqrt(norm));
      }
    });
}

TEST_CASE("key_mask: performer and rfa refuse one that does not fit", "[kernel_key_mask][refusals]") {
  const tensor<float> x(2, 2, 6, 3, 0.5f), w(1, 1, 4, 3, 0.5f);
  tensor<float> out(2, 2, 6, 3, 7), gradient = out;
  const tensor<std::uint8_t> bytes(1, 1, 9, 9, 1);
  attn::execution serial;
  attn::performer_state<float> performer({.batch = 2, .heads = 2, .features = 4, .value_dim = 3});
  attn::rfa_state<float> rfa({.batch = 2, .heads = 2, .features = 4, .value_dim = 3});
  const struct {
    idx_t batch, keys;
    bool is_null;
    const char* says;
  } wrong[] = {{3, 6, false, "key_mask batch"}, {1, 5, false, "key_mask length = key length 6; found 5"},
               {2, 6, true, "null"}};
  const in_view<float> in = view(x);
  for (const auto& mask : wrong) {
    const attn::tensor_view<const std::uint8_t, 2> seen(mask.is_null ? nullptr : bytes.data.data(),
                                                        {mask.batch, mask.keys});
    const std::pair<const char*, std::function<void()>> calls[] = {
        {"performer", [&] {
           compiled_performer<float>::call(in, in, in, view(out), features_of(w), {.key_mask = seen}, serial);
         }},
        {"performer_backward", [&] {
           compiled_performer<float>::backward(in, in, in, features_of(w), in, {.k = view(gradient)},
                                               {.key_mask = seen}, serial);
         }},
        {"performer_step", [&] {
           compiled_performer<float>::step(performer, in, in, in, view(out), features_of(w), {.key_mask = seen},
                                           serial);
         }},
        {"performer_state::append", [&] { performer.append(in, in, features_of(w), {.key_mask = seen}); }},
        {"rfa", [&] { compiled_rfa<float>::call(in, in, in, view(out), features_of(w), {.key_mask = seen}, serial); }},
        {"rfa_backward", [&] {
           compiled_rfa<float>::backward(in, in, in, features_of(w), in, {.k = view(gradient)}, {.key_mask = seen},
                                         serial);
         }},
        {"rfa_step", [&] {
           compiled_rfa<float>::step(rfa, in, in, in, view(out), features_of(w), {.key_mask = seen}, serial);
         }},
        {"rfa_state::append", [&] { rfa.append(in, in, features_of(w), {.key_mask = seen}); }}};
    for (const auto& [name, call] : calls) {
      const std::string message = refusal(call);
      INFO(name << ": " << message);
      CHECK(well_formed(message, name));
      CHECK(message.find(mask.says) != std::string::npos);
      CHECK((performer.tokens() == 0 && rfa.tokens() == 0));
      for (const auto* to : {&out, &gradient})
        CHECK(std::all_of(to->data.begin(), to->data.end(), [](float value) { return value == 7; }));
    }
  }
}

}  // namespace testing::kernel_key_mask_tests
