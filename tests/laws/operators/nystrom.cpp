#include "laws/law.hpp"
#include "laws/operators/mask.hpp"
#include "laws/stored.hpp"
#include "support/call_low_rank.hpp"

namespace testing::nystrom_law {
namespace {

struct nystrom_entry {
  std::string name;
  idx_t landmarks = 16;
  attn::pseudo_inverse inverse = attn::pseudo_inverse::per_head;
  idx_t width = 0;      // of the convolution
  bool others = false;  // a scale, iterations and a cutoff that are not the default
  bool mask = false;
};

template <class T>
struct parameters {
  nystrom_entry entry;
  tensor<T> kernel, d_kernel;
  tensor<double> mask;
  key_mask_bytes seen;

  parameters(const nystrom_entry& e, const law_shape& s)
      : entry(e), kernel(1, 1, s.heads, e.width),
        mask(e.mask ? key_mask_for_reference(law_key_mask(s), s) : tensor<double>{}), seen(mask) {
    for (idx_t h = 0; h < s.heads; ++h)
      for (idx_t p = 0; p < e.width; ++p)
        kernel(0, 0, h, p) = static_cast<T>((3 * (s.first_head + h) + 5 * p) % 7) / 8 - T(0.25);
    d_kernel = kernel;
  }
  attn::nystrom_options<T> options(const auto& call) const {
    attn::nystrom_options<T> o;
    call.set_lengths(o);
    o.landmarks = entry.landmarks;
    o.inverse = entry.inverse;
    o.key_mask = seen.view();
    if (entry.others) o.scale = T(0.3), o.iterations = 4, o.cutoff = T(0.1);
    if (entry.width > 0) o.convolution = {kernel.data.data(), {kernel.length(), kernel.dim()}};
    return o;
  }
  reference::nystrom_options reference_options(const law_reference_call& call) const {
    reference::nystrom_options o;
    call.set_lengths(o);
    o.landmarks = entry.landmarks;
    o.inverse = static_cast<reference::pinv>(entry.inverse);
    o.key_mask = mask;
    const attn::nystrom_options<T> given = options(law_call<T>{});
    if (given.scale) o.scale = static_cast<double>(*given.scale);
    o.iterations = given.iterations, o.cutoff = static_cast<double>(given.cutoff);
    if (entry.width > 0) o.convolution = call.parameter(kernel);
    return o;
  }
};

template <class T>
bound<T> bind_nystrom(const nystrom_entry& entry, const law_shape& s) {
  return [p = std::make_shared<parameters<T>>(entry, s)](const law_call<T>& call) {
    compiled_nystrom<T>::call(call.q, call.k, call.v, call.out, p->options(call), *call.execution);
  };
}

template <class T>
backward_binder<T> nystrom_backward(const nystrom_entry& entry) {
  return [entry](const law_shape& s) {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_backward_call<T>& call) {
      attn::nystrom_gradients<T> g{.q = call.dq, .k = call.dk, .v = call.dv};
      tensor<T>& kernel = p->d_kernel;
      if (p->entry.width > 0) g.convolution = {kernel.data.data(), {kernel.length(), kernel.dim()}};
      compiled_nystrom<T>::backward(call.q, call.k, call.v, call.d_out, g, p->options(call), *call.execution);
      call.give(kernel.data);
    };
  };
}

template <class T>
law_operator<T> operator_of(const nystrom_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.averages = false;  // only where A is inverted exactly, and none of its small singular values is cut off
  op.independent = entry.inverse != attn::pseudo_inverse::whole_batch;
  op.lse = false;
  op.bind = [entry](const law_shape& s) { return bind_nystrom<T>(entry, s); };
  op.queries_mix = true;  // landmarks
  op.backward = nystrom_backward<T>(entry);
  op.reference = [entry](const law_shape& s) {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_reference_call& call) {
      return reference::nystrom(call.q, call.k, call.v, p->reference_options(call));
    };
  };
  if (op.independent)
    op.sees = [entry](const law_shape& s, idx_t b, idx_t, idx_t, idx_t j) {
      return !(entry.mask && !key_mask_sees(s.first_batch + b, j));
    };
  return op;
}

template <class T>
law_limit<T> landmarks_for_all(std::string name, idx_t more, bool mask = false) {
  return {name,
          [=](const law_shape& s) {
            return bind_nystrom<T>({.name = "", .landmarks = std::max<idx_t>(1, s.keys) + more, .mask = mask}, s);
          },
          [=](const law_shape& s) -> bound<T> {
            return [p = std::make_shared<parameters<T>>(nystrom_entry{.name = "", .mask = mask}, s)](
                       const law_call<T>& call) {
              compiled_full_softmax<T>::call(call.q, call.k, call.v, call.out, {.key_mask = p->seen.view()}, {},
                                             *call.execution);
            };
          }};
}

template <class T>
void add_nystrom(std::vector<law_operator<T>>& all) {
  const auto exact = attn::pseudo_inverse::exact;
  for (const nystrom_entry& entry : {nystrom_entry{"nystrom"},
                                     {"nystrom with a convolution", 50, attn::pseudo_inverse::per_head, 5},
                                     {"nystrom, scaled", 16, attn::pseudo_inverse::per_head, 0, true},
                                     {"nystrom, exact inverse", 12, exact},
                                     {"nystrom with a key_mask and a convolution", 14, attn::pseudo_inverse::per_head,
                                      5, false, true},
                                     {"nystrom, norms of the whole batch", 9, attn::pseudo_inverse::whole_batch},
                                     {"nystrom of more landmarks than a block of rows", 110, exact, 3, false}})
    all.push_back(operator_of<T>(entry));
  all[all.size() - 7].limits = {landmarks_for_all<T>("as many landmarks as tokens", 0),
                                landmarks_for_all<T>("as many landmarks as tokens, a key_mask", 0, true),
                                landmarks_for_all<T>("more landmarks than tokens", 1000000)};
  all.back().without = {{"lse", "there are three softmaxes"},
                        {"causality", "bidirectional by definition"},
                        {"averages", "rows of the three factors' product sum to 1 only where the inverse is exact"},
                        {"stream", "bidirectional by definition"},
                        {"long_rows", "landmarks attend in pieces, merged: nystrom_run.hpp"}};
}
const law_entries entries("nystrom", [](auto& all) { add_nystrom(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  all.push_back({"nystrom", false,
                 [](const stored_call<S>& c) {
                   using compiled = compiled_nystrom<S>;
                   auto options = c.template options<compiled>(false);
                   options.landmarks = 16;
                   compiled::call(c.q, c.k, c.v, c.out, options, c.execution);
                   compiled::backward(c.q, c.k, c.v, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options, c.execution);
                 }});
}
const stored_entries stored_form("nystrom", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::nystrom_law
