#include "reference/lsh.hpp"

#include "laws/operators/patterns.hpp"
#include "laws/stored.hpp"
#include "support/call_lsh.hpp"

namespace testing::lsh_law {
namespace {

struct lsh_entry {
  std::string name;
  idx_t rounds, buckets, chunk;
  bool causal = false, wrap = false, unrotated = false;
  bool scores = false;  // softcap, sinks, ALiBi, scale, a score function
  idx_t lookback = 1, lookahead = 0;
  bool scaled = true;
  double norm_eps = 0;
};

template <class T>
struct parameters {
  lsh_entry entry;
  tensor<T> rotations;
  std::vector<T> slopes, sinks, d_slopes, d_sinks;
  law_shape shape;
  score_of<T> score;

  parameters(const lsh_entry& e, const law_shape& s)
      : entry(e), rotations(s.heads, e.rounds, s.dim, e.buckets / 2), shape(s) {
    const idx_t per_head = rotations.size() / s.heads;
    for (idx_t h = 0; h < s.heads && !e.unrotated; ++h) {
      random_source random(static_cast<std::uint64_t>(s.first_head + h) + 11);
      for (idx_t n = 0; n < per_head; ++n)
        rotations.data[static_cast<std::size_t>(h * per_head + n)] = static_cast<T>(random.normal());
    }
    if (e.scores) slopes = law_slopes<T>(s), sinks = law_sinks<T>(s), score = own_score_of<T>(s);
    d_slopes = slopes, d_sinks = sinks;
  }

  attn::lsh_options<T> options(const auto& call) const {
    attn::lsh_options<T> o;
    o.rounds = entry.rounds, o.buckets = entry.buckets, o.chunk = entry.chunk;
    o.causal = entry.causal, o.wrap = entry.wrap, o.rotations = view(rotations);
    o.lookback = entry.lookback, o.lookahead = entry.lookahead;
    o.scaled = entry.scaled, o.norm_eps = static_cast<T>(entry.norm_eps);
    if (entry.scores) o.softcap = T(2), o.scale = T(0.3);
    o.alibi_slopes = slopes, o.sinks = sinks;
    call.set_lengths(o);
    o.lse = call.lse;
    return o;
  }
  reference::lsh_options reference_options(const law_reference_call& call) const {
    reference::lsh_options o;
    o.rounds = entry.rounds, o.buckets = entry.buckets, o.chunk = entry.chunk;
    o.causal = entry.causal, o.wrap = entry.wrap, o.rotations = cast<double>(rotations);
    o.lookback = entry.lookback, o.lookahead = entry.lookahead, o.scaled = entry.scaled;
    o.norm_eps = static_cast<double>(static_cast<T>(entry.norm_eps));
    if (entry.scores) o.softcap = 2, o.scale = static_cast<double>(T(0.3));
    o.alibi_slopes = call.parameter(slopes), o.sinks = call.parameter(sinks);
    o.score = mask_for_reference(shape, call, false, entry.scores);
    call.set_lengths(o);
    return o;
  }
};

template <class T>
bound<T> bind_lsh(const lsh_entry& entry, const law_shape& s) {
  return [p = std::make_shared<parameters<T>>(entry, s)](const law_call<T>& call) {
    compiled_lsh<T>::call(call.q, call.v, call.out, p->options(call), p->score, *call.execution);
  };
}

template <class T>
backward_binder<T> lsh_backward(const lsh_entry& entry) {
  return [entry](const law_shape& s) {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_backward_call<T>& call) {
      attn::lsh_gradients<T> g{.q = call.dq, .v = call.dv};
      if (p->entry.scores) g.alibi_slopes = p->d_slopes, g.sinks = p->d_sinks;
      compiled_lsh<T>::backward(call.q, call.v, call.out, call.d_out, g, p->options(call), p->score,
                                own_score_backward<T>, *call.execution);
      call.give(p->d_slopes, p->d_sinks);
    };
  };
}

// Full softmax over unit keys, where query i sees the other keys for which seen(i, j).
template <class T, class Seen>
binder<T> masked_full(Seen seen) {
  return [seen](const law_shape& s) {
    return [seen, s](const law_call<T>& call) {
      tensor<double> q(s.batch, s.heads, s.queries, s.dim);
      for (idx_t b = 0; b < s.batch; ++b)
        for (idx_t h = 0; h < s.heads; ++h)
          for (idx_t i = 0; i < s.queries; ++i)
            for (idx_t d = 0; d < s.dim; ++d) q(b, h, i, d) = static_cast<double>(call.q(b, h, i, d));
      const tensor<T> k = cast<T>(reference::lsh_keys(q, 0));
      tensor<T> v(s.batch, s.heads, s.queries, s.value_dim);
      for (idx_t b = 0; b < s.batch; ++b)
        for (idx_t h = 0; h < s.heads; ++h)
          for (idx_t i = 0; i < s.queries; ++i)
            for (idx_t d = 0; d < s.value_dim; ++d) v(b, h, i, d) = call.v(b, h / (s.heads / s.kv_heads), i, d);
      attn::full_softmax_options<T> o;
      o.lse = call.lse;
      compiled_full_softmax<T>::call(
          call.q, view(k), view(std::as_const(v)), call.out, o,
          [&](T score, idx_t, idx_t, idx_t i, idx_t j) {
            const bool alone = s.queries == 1;  // it may see itself
            return alone || (i != j && seen(i, j)) ? score : -std::numeric_limits<T>::infinity();
          },
          *call.execution);
    };
  };
}

template <class T>
law_operator<T> operator_of(const lsh_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  // Law 5 is not for it: how early tokens sort into chunks depends on later ones.
  op.averages = !entry.scores;
  op.cross = false;
  op.tied = true;
  if (entry.chunk >= 257)  // all that law 10 asks for share it; otherwise the hashes say who sees whom
    op.sees = [](const law_shape& s, idx_t, idx_t, idx_t i, idx_t j) { return i != j || s.keys == 1; };
  op.bind = [entry](const law_shape& s) { return bind_lsh<T>(entry, s); };
  op.backward = lsh_backward<T>(entry);
  op.reference = [entry](const law_shape& s) {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_reference_call& call) {
      return reference::lsh(call.q, call.v, p->reference_options(call));
    };
  };
  return op;
}

template <class T>
void add_lsh(std::vector<law_operator<T>>& all) {
  law_operator<T> op = operator_of<T>({.name = "lsh", .rounds = 2, .buckets = 8, .chunk = 16});
  const auto limit = [](const lsh_entry& entry) {
    return [entry](const law_shape& s) { return bind_lsh<T>(entry, s); };
  };
  op.limits.push_back(
      {"a chunk of the length", limit({"", 1, 8, 300}), masked_full<T>([](idx_t, idx_t) { return true; })});
  op.limits.push_back({"one bucket: local chunks",
                       limit({.name = "", .rounds = 1, .buckets = 2, .chunk = 16, .unrotated = true}),
                       masked_full<T>([](idx_t i, idx_t j) { return j / 16 == i / 16 || j / 16 + 1 == i / 16; })});
  all.push_back(op);
  all.push_back(operator_of<T>({.name = "lsh of everything",
                                .rounds = 3,
                                .buckets = 6,
                                .chunk = 10,
                                .causal = true,
                                .wrap = true,
                                .scores = true}));
  all.push_back(operator_of<T>({.name = "lsh, all in a chunk", .rounds = 2, .buckets = 4, .chunk = 257}));
  all.push_back(operator_of<T>({.name = "lsh with lookahead, unscaled",
                                .rounds = 2,
                                .buckets = 8,
                                .chunk = 12,
                                .lookback = 2,
                                .lookahead = 1,
                                .scaled = false,
                                .norm_eps = 1e-3}));
  all.back().without = {
      {"cross", "queries are keys"},
      {"causality", "later tokens take places in the sorted order, which moves what earlier ones see"},
      {"stream", "there is no step"},
                        {"long_rows", "rows see chunks"}};
}
const law_entries entries("lsh", [](auto& all) { add_lsh(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  all.push_back({"lsh", false,
                 [](const stored_call<S>& c) {
                   // not causal: tokens that come later take places in the sorted order
                   using compiled = compiled_lsh<S>;
                   auto options = c.template options<compiled>(false);
                   options.chunk = 16, options.buckets = 8;
                   compiled::call(c.q, c.v, c.out, options, {}, c.execution);
                   compiled::backward(c.q, c.v, c.out, c.d_out, {.q = c.dq, .v = c.dv}, options, {}, {}, c.execution);
                 },
                 stored::heads});
}
const stored_entries stored_form("lsh", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::lsh_law
