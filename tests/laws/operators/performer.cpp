#include "laws/law.hpp"
#include "laws/operators/mask.hpp"
#include "laws/stored.hpp"
#include "support/call_kernel.hpp"

namespace testing::performer_law {
namespace {

struct performer_entry {
  std::string name;
  attn::performer_kernel kernel = attn::performer_kernel::positive;
  bool causal = false, own_features = false, centred = false;  // own: a matrix for every query head
  double feature_eps = 0;
  bool mask = false;

  // Sines and cosines cancel where |q|^2 and |k|^2 are large; here they are 1 / 2.
  template <class T>
  std::optional<T> scale(idx_t dim) const {
    if (kernel == attn::performer_kernel::trigonometric) return T(0.5) / static_cast<T>(dim);
    return {};
  }
};

template <class T>
struct parameters {
  performer_entry entry;
  attn::tensor<T, 3> features;
  bool all_heads;
  std::vector<T> d_features;
  tensor<double> mask;
  key_mask_bytes seen;

  parameters(const performer_entry& e, const law_shape& s)
      : entry(e),
        features(e.own_features ? drawn(s.dim, s.first_head + s.heads) : drawn(s.dim, 1)),
        all_heads(e.own_features),
        d_features(static_cast<std::size_t>((all_heads ? s.heads : 1) * 24 * s.dim)),
        mask(e.mask ? key_mask_for_reference(law_key_mask(s), s) : tensor<double>{}),
        seen(mask) {}
  static attn::tensor<T, 3> drawn(idx_t dim, idx_t heads) {
    return attn::draw_features<T>(24, dim, {.seed = 11, .heads = heads});
  }
  feature_view<T> view(idx_t heads) const {
    const auto all = features.view();
    return all_heads ? all.slice(0, all.extent(0) - heads, heads) : all;
  }
  attn::performer_options<T> options(const auto& call) const {
    attn::performer_options<T> o;
    o.kernel = entry.kernel;
    o.causal = entry.causal;
    o.center_keys = entry.centred;
    o.scale = entry.template scale<T>(call.q.extent(3));
    if (entry.feature_eps > 0) o.eps = static_cast<T>(entry.feature_eps), o.feature_eps = o.eps;
    call.set_lengths(o);
    o.key_mask = seen.view();
    return o;
  }
  reference::performer_options reference_options(const law_reference_call& call) const {
    reference::performer_options o;
    o.kernel = static_cast<reference::performer_kernel>(entry.kernel);
    o.causal = entry.causal, o.center_keys = entry.centred;
    if (const auto s = entry.template scale<T>(call.q.dim())) o.scale = static_cast<double>(*s);
    if (entry.feature_eps > 0) o.eps = static_cast<double>(static_cast<T>(entry.feature_eps)), o.feature_eps = o.eps;
    o.features = call.parameter(features_in_double(view(call.q.heads())));
    o.key_mask = mask;
    call.set_lengths(o);
    return o;
  }
};

template <class T>
law_operator<T> operator_of(const performer_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.causal = entry.causal;
  op.averages = entry.feature_eps == 0;  // eps is part of the denominator
  op.lse = false;
  op.error_factor = 4;  // exponents are about |q|^2 / 2 larger than scores, and their rounding is that of weights
  // Sines and cosines cancel, as in rfa.cpp: the condition number of a row, measured likewise for 24 rows of W and this
  // scale, is 1.4 to 1.9 in the median row, 2 to 5 in the worst row of most shapes, and 26 in one row of dim 1.
  if (entry.kernel == attn::performer_kernel::trigonometric) op.positive = false, op.error_factor = 30;
  op.bind = [entry](const law_shape& shape) -> bound<T> {
    return [p = std::make_shared<parameters<T>>(entry, shape)](const law_call<T>& call) {
      compiled_performer<T>::call(call.q, call.k, call.v, call.out, p->view(call.q.extent(1)), p->options(call),
                                  *call.execution);
    };
  };
  op.backward = [entry](const law_shape& shape) {
    return [p = std::make_shared<parameters<T>>(entry, shape)](const law_backward_call<T>& call) {
      const feature_view<T> features = p->view(call.q.extent(1));
      attn::performer_gradients<T> g{.q = call.dq, .k = call.dk, .v = call.dv};
      g.features = {p->d_features.data(), features.extents()};
      compiled_performer<T>::backward(call.q, call.k, call.v, features, call.d_out, g, p->options(call),
                                      *call.execution);
      call.give(p->d_features);
    };
  };
  op.reference = [entry](const law_shape& shape) {
    return [p = std::make_shared<parameters<T>>(entry, shape)](const law_reference_call& call) {
      reference::performer_options o = p->reference_options(call);
      if (p->entry.kernel == attn::performer_kernel::trigonometric) o.terms = call.terms;
      return reference::performer(call.q, call.k, call.v, o);
    };
  };
  if (entry.causal)
    op.stream = [entry](const law_shape& shape) -> bound<T> {
      struct fed {
        parameters<T> p;
        attn::performer_state<T> state;
        idx_t tokens = 0;
      };
      auto shared = std::make_shared<fed>(
          fed{parameters<T>(entry, shape),
              attn::performer_state<T>({.batch = shape.batch,
                                        .heads = entry.own_features ? shape.heads : shape.kv_heads,
                                        .features = 24,
                                        .value_dim = shape.value_dim},
                                       {.kernel = entry.kernel})});
      return [shared](const law_call<T>& call) {
        attn::performer_step_options<T> options;
        call.set_lengths(options);
        options.scale = shared->p.entry.template scale<T>(call.q.extent(3));
        options.key_mask = shared->p.seen.view(shared->tokens, call.k.extent(2));
        shared->tokens += call.k.extent(2);
        compiled_performer<T>::step(shared->state, call.q, call.k, call.v, call.out, shared->p.view(call.q.extent(1)),
                                    options, *call.execution);
      };
    };
  op.sees = [entry](const law_shape& s, idx_t b, idx_t, idx_t i, idx_t j) {
    return (!entry.causal || j <= i + s.keys - s.queries) && !(entry.mask && !key_mask_sees(s.first_batch + b, j));
  };
  return op;
}

template <class T>
void add_performer(std::vector<law_operator<T>>& all) {
  using attn::performer_kernel;
  for (const performer_entry& entry :
       {performer_entry{.name = "performer"},
        {.name = "performer causal", .causal = true},
        {.name = "performer hyperbolic, features per head",
        .kernel = performer_kernel::hyperbolic,
        .own_features = true},
        {.name = "performer hyperbolic, causal, features per head",
        .kernel = performer_kernel::hyperbolic,
        .causal = true,
        .own_features = true},
        {.name = "performer trigonometric", .kernel = performer_kernel::trigonometric},
        {.name = "performer trigonometric, causal", .kernel = performer_kernel::trigonometric, .causal = true},
        {.name = "performer relu", .kernel = performer_kernel::relu},
        {.name = "performer relu, causal", .kernel = performer_kernel::relu, .causal = true},
        {.name = "performer with centred keys", .centred = true},
        {.name = "performer causal with a key_mask", .causal = true, .mask = true},
        {.name = "performer with centred keys, a key_mask", .centred = true, .mask = true},
        {.name = "performer with feature_eps, eps", .feature_eps = 1e-3}})
    all.push_back(operator_of<T>(entry));
  all.back().without = {{"lse", "there is no softmax"},
                        {"limits", "softmax in the mean over features: kernel/random_features.cpp tests the rate"},
                        {"long_rows", "its sums are those of linear: kernel_sums.hpp"}};
}
const law_entries entries("performer", [](auto& all) { add_performer(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  all.push_back(stored_random_features<compiled_performer, S>("performer", false));
  all.push_back(stored_random_features<compiled_performer, S>("performer causal", true));
}
const stored_entries stored_form("performer", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::performer_law
