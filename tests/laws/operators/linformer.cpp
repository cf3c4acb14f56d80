#include "laws/law.hpp"
#include "laws/operators/mask.hpp"
#include "laws/stored.hpp"
#include "support/call_low_rank.hpp"

namespace testing::linformer_law {
namespace {

struct linformer_entry {
  std::string name;
  idx_t rank = 1;
  bool e_per_head = false, f_per_head = false, one = false;  // one: F is E
  bool scaled = false, mask = false;

  tensor<double> key_mask(const law_shape& s) const {
    return mask ? key_mask_for_reference(law_key_mask(s), s) : tensor<double>{};
  }
};

// Deterministic in the absolute head and the token, so that a part of a call gets the numbers it has in the whole.
template <class T>
tensor<T> projection_for(std::uint64_t seed, const law_shape& s, idx_t rank, bool per_head) {
  tensor<T> e(1, per_head ? s.heads : 1, rank, s.keys);
  for (idx_t h = 0; h < e.heads(); ++h)
    for (idx_t j = 0; j < s.keys; ++j) {
      random_source random(seed + static_cast<std::uint64_t>((per_head ? s.first_head + h : 0) * 10000 + j));
      for (idx_t r = 0; r < rank; ++r) e(0, h, r, j) = static_cast<T>(random.normal() / std::sqrt(double(rank)));
    }
  return e;
}

template <class T>
bound<T> bind_projections(tensor<T> keys, tensor<T> values, std::optional<T> scale = {}, key_mask_bytes mask = {}) {
  struct projections {
    tensor<T> e, f;
    key_mask_bytes seen;
  };
  return [scale,
          p = std::make_shared<projections>(projections{std::move(keys), std::move(values), std::move(mask)})](const law_call<T>& call) {
    attn::linformer_options<T> options;
    options.scale = scale, options.key_mask = p->seen.view();
    call.set_lengths(options);
    options.lse = call.lse;
    const projection_view<T> e = heads_view(p->e), f = p->f.empty() ? e : heads_view(p->f);
    compiled_linformer<T>::call(call.q, call.k, call.v, call.out, e, f, options, *call.execution);
  };
}

template <class T>
backward_binder<T> linformer_backward(const linformer_entry& entry) {
  struct memory {
    tensor<T> e, f, d_e, d_f;
    key_mask_bytes seen;
  };
  return [entry](const law_shape& s) {
    auto m = std::make_shared<memory>();
    m->e = m->f = projection_for<T>(1, s, entry.rank, entry.e_per_head);
    if (!entry.one) m->f = projection_for<T>(2, s, entry.rank, entry.f_per_head);
    m->d_e = m->e, m->d_f = m->f, m->seen = key_mask_bytes(entry.key_mask(s));
    return [m, entry](const law_backward_call<T>& call) {
      attn::linformer_options<T> options;
      if (entry.scaled) options.scale = T(0.3);
      options.key_mask = m->seen.view();
      call.set_lengths(options);
      options.lse = call.lse;
      const auto per_head = [](tensor<T>& x) {
        return attn::tensor_view<T, 3>(x.data.data(), {x.heads(), x.length(), x.dim()});
      };
      compiled_linformer<T>::backward(
          call.q, call.k, call.v, call.out, heads_view(m->e), heads_view(m->f), call.d_out,
          {.q = call.dq, .k = call.dk, .v = call.dv, .e = per_head(m->d_e), .f = per_head(m->d_f)}, options,
          *call.execution);
      call.give(m->d_e.data, m->d_f.data);
    };
  };
}

template <class T>
law_operator<T> operator_of(const linformer_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.averages = false;  // the rows of F do not sum to 1
  op.bind = [entry](const law_shape& s) {
    return bind_projections(projection_for<T>(1, s, entry.rank, entry.e_per_head),
                            entry.one ? tensor<T>{} : projection_for<T>(2, s, entry.rank, entry.f_per_head),
                            entry.scaled ? std::optional<T>(T(0.3)) : std::nullopt, key_mask_bytes(entry.key_mask(s)));
  };
  op.backward = linformer_backward<T>(entry);
  op.reference = [entry](const law_shape& s) {
    reference::linformer_options options;
    options.e = options.f = cast<double>(projection_for<T>(1, s, entry.rank, entry.e_per_head));
    if (!entry.one) options.f = cast<double>(projection_for<T>(2, s, entry.rank, entry.f_per_head));
    if (entry.scaled) options.scale = static_cast<double>(T(0.3));
    options.key_mask = entry.key_mask(s);
    return [options](const law_reference_call& call) {
      reference::linformer_options o = options;
      o.e = call.parameter(options.e), o.f = call.parameter(options.f);
      call.set_lengths(o);
      return reference::linformer(call.q, call.k, call.v, o);
    };
  };
  op.sees = [entry](const law_shape& s, idx_t b, idx_t, idx_t, idx_t j) {
    return !(entry.mask && !key_mask_sees(s.first_batch + b, j));
  };
  return op;
}

template <class T>
law_limit<T> identity_is_full() {
  return {"rank = length, identity",
          [](const law_shape& s) {
            tensor<T> e(1, 1, std::max<idx_t>(1, s.keys), s.keys);
            for (idx_t j = 0; j < s.keys; ++j) e(0, 0, j, j) = T(1);
            return bind_projections(e, tensor<T>{});
          },
          [](const law_shape&) -> bound<T> {
            return [](const law_call<T>& call) {
              attn::full_softmax_options<T> options;
              options.lse = call.lse;
              compiled_full_softmax<T>::call(call.q, call.k, call.v, call.out, options, {}, *call.execution);
            };
          }};
}

template <class T>
void add_linformer(std::vector<law_operator<T>>& all) {
  for (const linformer_entry& entry : {linformer_entry{"linformer", 40},
                                       {"linformer, one projection for keys and values", 9, false, false, true},
                                       {"linformer, projections per head", 33, true, true},
                                       {"linformer, F per head, a key_mask", 30, false, true, false, false, true},
                                       {"linformer, F per head, scaled", 16, false, true, false, true}})
    all.push_back(operator_of<T>(entry));
  all[all.size() - 5].limits = {identity_is_full<T>()};
  all.back().without = {{"causality", "bidirectional by definition"},
                        {"averages", "rows of F do not sum to 1"},
                        {"stream", "bidirectional by definition"},
                        {"long_rows", "rows see as many keys as the projections have rows"}};
}
const law_entries entries("linformer", [](auto& all) { add_linformer(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  all.push_back({"linformer", false,
                 [](const stored_call<S>& c) {
                   using compiled = compiled_linformer<S>;
                   static const tensor<S> e = stored::drawn<S>(9, 1, 1, stored::features, stored::length,
                                                               1 / std::sqrt(double(stored::length)));
                   const auto options = c.template options<compiled>(false);
                   compiled::call(c.q, c.k, c.v, c.out, stored::matrices(e), stored::matrices(e), options, c.execution);
                   compiled::backward(c.q, c.k, c.v, c.out, stored::matrices(e), stored::matrices(e), c.d_out,
                                      {.q = c.dq, .k = c.dk, .v = c.dv}, options, c.execution);
                 }});
}
const stored_entries stored_form("linformer", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::linformer_law
