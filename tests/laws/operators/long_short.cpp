#include "reference/long_short.hpp"

#include "laws/operators/mask.hpp"
#include "laws/operators/patterns.hpp"
#include "laws/stored.hpp"
#include "support/call_long_short.hpp"

namespace testing::long_short_law {
namespace {

struct long_short_entry {
  std::string name;
  idx_t left, right, rank, segment = 0, block = 0;
  bool norms = false, scores = false;  // scores: softcap, sinks, scale
  bool mask = false;
};

template <class T>
struct parameters {
  long_short_entry entry;
  tensor<T> logits, d_logits;
  std::vector<T> sinks, gamma, beta, d_sinks, d_norms[4];  // of local gamma and beta, global gamma and beta
  tensor<double> mask;
  key_mask_bytes seen;

  parameters(const long_short_entry& e, const law_shape& s)
      : entry(e), logits(s.batch, s.heads, s.keys, e.rank),
        mask(e.mask ? key_mask_for_reference(law_key_mask(s), s) : tensor<double>{}), seen(mask) {
    for (idx_t b = 0; b < s.batch; ++b)
      for (idx_t h = 0; h < s.heads; ++h)
        for (idx_t j = 0; j < s.keys; ++j)
          for (idx_t c = 0; c < e.rank; ++c) {  // by where it stands in the larger batch
            random_source random(
                static_cast<std::uint64_t>((((s.first_batch + b) * 16 + s.first_head + h) * 1000 + j) * 20 + c));
            logits(b, h, j, c) = static_cast<T>(2 * random.normal());
          }
    d_logits = logits;
    if (e.scores) sinks = d_sinks = law_sinks<T>(s);
    if (!e.norms) return;
    gamma = cast<T>(random_values(1, s.dim)), beta = cast<T>(random_values(2, s.dim));
    for (std::vector<T>& list : d_norms) list = gamma;
  }

  attn::long_short_options<T> options(const auto& call) const {
    attn::long_short_options<T> o;
    o.left = entry.left, o.right = entry.right, o.block = entry.block;
    o.causal = entry.segment > 0, o.segment = entry.segment;
    if (entry.norms) o.norm_eps = T(1e-3);
    o.local_gamma = o.global_gamma = gamma, o.local_beta = o.global_beta = beta;
    if (entry.scores) o.softcap = T(2), o.scale = T(0.3);
    o.sinks = sinks, o.key_mask = seen.view();
    call.set_lengths(o);
    o.lse = call.lse;
    return o;
  }
  reference::long_short_options reference_options(const law_reference_call& call) const {
    reference::long_short_options o;
    o.left = entry.left, o.right = entry.right, o.block = entry.block;
    o.causal = entry.segment > 0, o.segment = entry.segment;
    o.key_mask = mask;
    o.logits = call.parameter(logits), o.sinks = call.parameter(sinks);
    o.local_gamma = call.parameter(gamma), o.local_beta = call.parameter(beta);
    o.global_gamma = call.parameter(gamma), o.global_beta = call.parameter(beta);
    if (entry.norms) o.norm_eps = static_cast<double>(T(1e-3));
    if (entry.scores) o.softcap = 2, o.scale = static_cast<double>(T(0.3));
    call.set_lengths(o);
    return o;
  }
};

template <class T>
bound<T> bind_long_short(const long_short_entry& entry, const law_shape& s) {
  return [p = std::make_shared<parameters<T>>(entry, s)](const law_call<T>& call) {
    compiled_long_short<T>::call(call.q, call.k, call.v, call.out, view(std::as_const(p->logits)), p->options(call),
                                 *call.execution);
  };
}

template <class T>
backward_binder<T> long_short_backward(const long_short_entry& entry) {
  return [entry](const law_shape& s) {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_backward_call<T>& call) {
      attn::long_short_gradients<T> g{.q = call.dq, .k = call.dk, .v = call.dv, .logits = view(p->d_logits)};
      auto& norms = p->d_norms;
      if (p->entry.scores) g.sinks = p->d_sinks;
      if (p->entry.norms)
        g.local_gamma = norms[0], g.local_beta = norms[1], g.global_gamma = norms[2], g.global_beta = norms[3];
      compiled_long_short<T>::backward(call.q, call.k, call.v, call.out, view(std::as_const(p->logits)), call.d_out, g,
                                       p->options(call), *call.execution);
      call.give(p->d_logits.data, p->d_sinks, norms[0], norms[1], norms[2], norms[3]);
    };
  };
}

template <class T>
law_operator<T> operator_of(const long_short_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.causal = entry.segment > 0;
  op.averages = !entry.scores && !entry.norms;
  op.cross = !entry.norms;
  op.square = entry.norms;
  op.bind = [entry](const law_shape& s) { return bind_long_short<T>(entry, s); };
  op.backward = long_short_backward<T>(entry);
  op.reference = [entry](const law_shape& s) {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_reference_call& call) {
      return reference::long_short(call.q, call.k, call.v, p->reference_options(call));
    };
  };
  // Compressed keys mix the tokens of all, or of their segment.
  op.sees = [entry](const law_shape& s, idx_t b, idx_t, idx_t i, idx_t j) {
    if (entry.mask && !key_mask_sees(s.first_batch + b, j)) return false;
    const idx_t position = i + s.keys - s.queries;
    if (entry.segment == 0) return true;
    const idx_t end = (j / entry.segment + 1) * entry.segment;
    if (end <= s.keys && end - 1 <= position) return true;
    return position - entry.left <= j && j <= position;
  };
  return op;
}

template <class T>
void add_long_short(std::vector<law_operator<T>>& all) {
  law_operator<T> op = operator_of<T>({.name = "long_short", .left = 10, .right = 4, .rank = 5});
  for (bool causal : {false, true})
    op.limits.push_back({"a window of the length, no compressed keys",
                         [causal](const law_shape& s) {
                           return bind_long_short<T>({"", 300, 300, 0, causal ? idx_t(20) : idx_t(0)}, s);
                         },
                         full_binder<T>(causal)});
  all.push_back(op);
  all.push_back(operator_of<T>({.name = "long_short causal", .left = 30, .right = 0, .rank = 2, .segment = 16}));
  all.push_back(operator_of<T>(
      {.name = "long_short with norms, blocks", .left = 5, .right = 9, .rank = 13, .block = 12, .norms = true}));
  all.push_back(operator_of<T>({.name = "long_short causal with a key_mask, norms",
                                .left = 9, .right = 0, .rank = 4, .segment = 11, .norms = true, .mask = true}));
  all.push_back(operator_of<T>(
      {.name = "long_short of everything", .left = 5, .right = 0, .rank = 3, .segment = 7, .scores = true}));
  all.back().without = {{"stream", "there is no step"},
                        {"long_rows", "rows see a window and compressed keys"}};
}
const law_entries entries("long_short", [](auto& all) { add_long_short(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  for (bool causal : {false, true})
    all.push_back({std::string("long_short") + (causal ? " causal" : ""), causal,
                   [=](const stored_call<S>& c) {
                     using compiled = compiled_long_short<S>;
                     // One head's logits serve all heads of all items, so that each may be computed alone.
                     static const tensor<S> logits = stored::drawn<S>(10, 1, 1, stored::length, 6);
                     const in_view<S> shared(logits.data.data(), {c.q.extent(0), c.q.extent(1), stored::length, 6},
                                             {0, 0, 6, 1});
                     auto options = c.template options<compiled>(causal);
                     options.left = 19, options.right = causal ? 0 : 11, options.segment = causal ? 32 : 0;
                     compiled::call(c.q, c.k, c.v, c.out, shared, options, c.execution);
                     compiled::backward(c.q, c.k, c.v, c.out, shared, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv},
                                        options, c.execution);
                   }});
}
const stored_entries stored_form("long_short", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::long_short_law
