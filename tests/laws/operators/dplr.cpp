#include "laws/law.hpp"
#include "laws/operators/mask.hpp"
#include "laws/stored.hpp"
#include "support/call_dplr.hpp"
#include "support/call_kernel.hpp"

namespace testing::dplr_law {
namespace {

struct dplr_entry {
  std::string name;
  int decays = 0;       // per token: 0, 1 or dim
  bool others = false;  // a scale, and a state to start from
  bool mask = false;
};

// A head's own a, b and decays wherever it stands in a larger batch.
template <class T>
struct dplr_parameters {
  dplr_entry entry;
  tensor<T> a, b, log_decay, state, d_a, d_b, d_log_decay, d_state;
  tensor<double> mask;
  key_mask_bytes seen;

  dplr_parameters(const dplr_entry& e, const law_shape& s)
      : entry(e), mask(e.mask ? key_mask_for_reference(law_key_mask(s), s) : tensor<double>{}), seen(mask) {
    const auto each_head = [&](idx_t rows, idx_t dim, auto&& fill) {
      tensor<T> x(s.batch, s.heads, rows, dim);
      for (idx_t n = 0; n < s.batch; ++n)
        for (idx_t h = 0; h < s.heads; ++h) {
          const tensor<double> one = fill(static_cast<std::uint64_t>(16 * (s.first_batch + n) + s.first_head + h));
          for (idx_t i = 0; i < rows; ++i)
            for (idx_t d = 0; d < dim; ++d) x(n, h, i, d) = static_cast<T>(one(0, 0, i, d));
        }
      return x;
    };
    const auto draw = [&](idx_t rows, idx_t dim, double low, double high) {
      return each_head(rows, dim, [&](std::uint64_t seed) {
        random_source random(seed);
        tensor<double> one(1, 1, rows, dim);
        for (double& x : one.data) x = low + (high - low) * random.uniform();
        return one;
      });
    };
    const auto reads = [&](bool second) {
      return each_head(s.keys, s.dim, [&](std::uint64_t seed) {
        tensor<double> first(1, 1, s.keys, s.dim), other = first;
        draw_reads(seed, first, other);
        return second ? other : first;
      });
    };
    a = d_a = reads(false), b = d_b = reads(true);
    if (e.decays) log_decay = d_log_decay = draw(s.keys, e.decays == 1 ? 1 : s.dim, -0.3, 0);
    if (e.others) state = d_state = draw(s.dim, s.value_dim, -1, 1);
  }
  attn::dplr_options<T> options(const auto& call) const {
    attn::dplr_options<T> o;
    call.set_lengths(o);
    o.log_decay = optional_view(log_decay), o.key_mask = seen.view();
    if (entry.others) o.scale = T(0.3), o.initial_state = optional_view(state);
    return o;
  }
  dplr_views<T> views(const auto& call) const {
    return {call.q, call.k, call.v, view(std::as_const(a)), view(std::as_const(b))};
  }
};

template <class T>
law_operator<T> operator_of(const dplr_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.causal = true;
  op.averages = op.positive = op.grouped = op.cross = op.lse = false;
  op.bind = [entry](const law_shape& shape) -> bound<T> {
    return [p = std::make_shared<dplr_parameters<T>>(entry, shape)](const law_call<T>& call) {
      compiled_dplr<T>::call(p->views(call), call.out, p->options(call), *call.execution);
    };
  };
  op.backward = [entry](const law_shape& shape) {
    return [p = std::make_shared<dplr_parameters<T>>(entry, shape)](const law_backward_call<T>& call) {
      attn::dplr_gradients<T> g{.q = call.dq, .k = call.dk, .v = call.dv, .a = view(p->d_a), .b = view(p->d_b)};
      if (given(p->d_log_decay)) g.log_decay = view(p->d_log_decay);
      if (given(p->d_state)) g.initial_state = view(p->d_state);
      compiled_dplr<T>::backward(p->views(call), call.d_out, g, p->options(call), *call.execution);
      call.give(p->d_a.data, p->d_b.data, p->d_log_decay.data, p->d_state.data);
    };
  };
  op.reference = [entry](const law_shape& shape) {
    return [p = std::make_shared<dplr_parameters<T>>(entry, shape)](const law_reference_call& call) {
      reference::dplr_options o;
      o.lengths = call.lengths, o.key_mask = p->mask;
      if (p->entry.others) o.scale = static_cast<double>(T(0.3));
      const tensor<double> a = call.parameter(p->a), b = call.parameter(p->b);
      return reference::result{
          reference::dplr<double>(
              {call.q, call.k, call.v, a, b, call.parameter(p->log_decay), call.parameter(p->state)}, o)
              .out,
          {}};
    };
  };
  op.sees = [entry](const law_shape& s, idx_t b, idx_t, idx_t i, idx_t j) {
    return j <= i && !(entry.mask && !key_mask_sees(s.first_batch + b, j));
  };
  if (entry.others) return op;
  op.stream = [entry](const law_shape& shape) -> bound<T> {
    struct fed {
      dplr_parameters<T> p;
      attn::dplr_state<T> state;
      idx_t tokens = 0;
    };
    auto shared = std::make_shared<fed>(
        fed{dplr_parameters<T>(entry, shape),
            attn::dplr_state<T>(
                {.batch = shape.batch, .heads = shape.heads, .dim = shape.dim, .value_dim = shape.value_dim})});
    return [shared](const law_call<T>& call) {
      const idx_t count = call.k.extent(2), begin = std::exchange(shared->tokens, shared->tokens + count);
      attn::dplr_step_options<T> options;
      call.set_lengths(options);
      options.key_mask = shared->p.seen.view(begin, count);
      dplr_views<T> x = shared->p.views(call);
      x.a = x.a.slice(2, begin, count), x.b = x.b.slice(2, begin, count);
      if (const auto all = optional_view(shared->p.log_decay)) options.log_decay = all.slice(2, begin, count);
      compiled_dplr<T>::step(shared->state, x, call.out, options, *call.execution);
    };
  };
  return op;
}

// Where nothing is read, keys and values are added up.
template <class T>
law_limit<T> without_reads_is_linear() {
  return {"a of 0",
          [](const law_shape& s) -> bound<T> {
            dplr_parameters<T> p({}, s);
            std::fill(p.a.data.begin(), p.a.data.end(), T(0));
            return [p = std::make_shared<dplr_parameters<T>>(std::move(p))](const law_call<T>& call) {
              attn::dplr_options<T> options{.scale = T(1)};
              call.set_lengths(options);
              compiled_dplr<T>::call(p->views(call), call.out, options, *call.execution);
            };
          },
          [](const law_shape&) -> bound<T> {
            return [](const law_call<T>& call) {
              attn::linear_options<T> options;
              options.causal = true, options.normalise = false;
              call.set_lengths(options);
              compiled_linear<T>::call(call.q, call.k, call.v, call.out, options, reference::linear_feature::identity,
                                       *call.execution);
            };
          }};
}

template <class T>
void add_dplr(std::vector<law_operator<T>>& all) {
  for (const dplr_entry& entry : {dplr_entry{.name = "dplr"},
                                  {.name = "dplr with a decay per token, key_mask", .decays = 1, .mask = true},
                                  {.name = "dplr with decays per channel", .decays = 2},
                                  {.name = "dplr scaled, from a state", .decays = 2, .others = true}})
    all.push_back(operator_of<T>(entry));
  all[all.size() - 4].limits = {without_reads_is_linear<T>()};
  all.back().without = {{"averages", "there is no denominator"},
                        {"lse", "there is no softmax"},
                        {"grouped", "a key head is one of the state"},
                        {"cross", "every token has a query and a key"},
                        {"long_rows", "a state that is read and written again is no sum"}};
}
const law_entries entries("dplr", [](auto& all) { add_dplr(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  stored_operator<S> one{"dplr", true, [](const stored_call<S>& c) {
                           using compiled = compiled_dplr<S>;
                           static const tensor<S> a = stored::drawn<S>(8, 1, 1, stored::length, stored::dim, 0.1),
                                                  b = stored::drawn<S>(9, 1, 1, stored::length, stored::dim, 0.1);
                           const auto options = c.template options<compiled>(true);
                           const auto each_head = [&](const tensor<S>& x) -> in_view<S> {
                             return {x.data.data(),
                                     {c.q.extent(0), c.q.extent(1), stored::length, stored::dim},
                                     {0, 0, stored::dim, 1}};
                           };
                           const dplr_views<S> x{c.q, c.k, c.v, each_head(a), each_head(b)};
                           compiled::call(x, c.out, options, c.execution);
                           compiled::backward(x, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options, c.execution);
                         }};
  one.kv_heads = stored::heads;
  all.push_back(std::move(one));
}
const stored_entries stored_form("dplr", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::dplr_law
