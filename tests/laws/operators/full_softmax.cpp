#include "reference/full_softmax.hpp"

#include "laws/operators/mask.hpp"
#include "laws/operators/span.hpp"
#include "laws/stored.hpp"

namespace testing::full_softmax_law {
namespace {

struct full_softmax_entry {
  std::string name;
  bool causal = false, bias = false, softcap = false, alibi = false, sinks = false, score = false;
  bool mask = false;  // and a scale, and where the first query is
  bool relative = false, forgets = false;
  idx_t span = 0;  // if not 0, it is given, and where the first queries are
  bool skips = false;  // and slopes by which what is far away is left out
};
constexpr idx_t first_position = 2;

// Deterministic in the absolute batch item and head, so that an item alone gets the parameters it has in a batch.
template <class T>
T bias_value(idx_t b, idx_t h, idx_t i, idx_t j) {
  const idx_t mixed = 5 * b + 3 * h + 7 * i + 11 * j;
  if (mixed % 13 == 0 && i != j) return -std::numeric_limits<T>::infinity();
  return static_cast<T>(mixed % 17) / 8;
}

template <class T>
struct parameters {
  full_softmax_entry entry;
  law_shape shape;
  std::vector<T> slopes, sinks;
  tensor<T> bias, relative, relative_keys, position_queries, decay;
  std::vector<std::uint8_t> key_mask;  // [B, Lk]
  law_mask mask;
  score_of<T> score;
  mutable std::vector<idx_t> first;  // of the last call

  parameters(const full_softmax_entry& e, const law_shape& s)
      : entry(e), shape(s), first(static_cast<std::size_t>(s.batch)) {
    if (e.alibi) slopes = law_slopes<T>(s);
    if (e.skips) slopes = law_steep_slopes<T>(s);
    if (e.sinks) sinks = law_sinks<T>(s);
    if (e.bias) {
      bias = tensor<T>(s.batch, s.heads, s.queries, s.keys);
      for (idx_t b = 0; b < s.batch; ++b)
        for (idx_t h = 0; h < s.heads; ++h)
          for (idx_t i = 0; i < s.queries; ++i)
            for (idx_t j = 0; j < s.keys; ++j)
              bias(b, h, i, j) = bias_value<T>(s.first_batch + b, s.first_head + h, i, j);
    }
    if (e.relative)
      relative = law_relative_bias<T>(s, e.bias), relative_keys = law_relative_keys<T>(s),
      position_queries = law_position_queries<T>(s);
    if (e.forgets) decay = law_log_decay<T>(s);
    if (e.mask) mask = law_mask(s), key_mask = law_key_mask(s);
    if (e.score) score = own_score_of<T>(s);
  }
  // call: of a forward or a backward pass.
  attn::full_softmax_options<T> options(const auto& call) const {
    attn::full_softmax_options<T> o;
    o.causal = entry.causal;
    call.set_lengths(o);
    o.lse = call.lse;
    if (entry.softcap) o.softcap = T(2);
    o.alibi_slopes = slopes, o.sinks = sinks;
    if (entry.bias) o.bias = view(bias);
    o.relative_bias = table_view(relative);
    if (entry.relative) {
      o.relative_keys = {relative_keys.data.data(), {shape.heads, 15, shape.dim}};
      o.position_queries = {position_queries.data.data(), {shape.heads, 7, shape.dim}};
    }
    if (entry.forgets) o.log_decay = {decay.data.data(), {decay.batch(), decay.heads(), decay.length()}};
    if (entry.mask) o.key_mask = attn::tensor_view<const std::uint8_t, 2>(key_mask.data(), {shape.batch, shape.keys});
    if (entry.mask) o.mask = mask.view(), o.scale = T(0.3), o.first_position = first_position;
    if (entry.span) set_first_positions(shape, call, first), o.span = entry.span, o.first_position = first;
    if (entry.skips) o.skip_below = law_skip_below<T>;
    return o;
  }
  attn::full_softmax_cached_options<T> cached_options(const law_call<T>& call) const {
    const auto o = options(call);
    return {.first_position = o.first_position, .span = o.span, .lengths = o.lengths, .sinks = o.sinks, .lse = o.lse};
  }
  reference::result reference_of(const law_reference_call& call) const {
    reference::full_softmax_options o;
    o.causal = entry.causal;
    call.set_lengths(o);
    if (entry.softcap) o.softcap = 2;
    o.alibi_slopes = call.parameter(slopes), o.sinks = call.parameter(sinks), o.bias = call.parameter(bias);
    o.relative_bias = call.parameter(relative), o.log_decay = call.parameter(decay);
    o.relative_keys = call.parameter(relative_keys), o.position_queries = call.parameter(position_queries);
    if (entry.mask) o.key_mask = key_mask_for_reference(key_mask, shape);
    if (entry.mask) o.scale = static_cast<double>(T(0.3)), o.first_position = first_position;
    if (entry.span) set_first_positions(shape, call, first), o.span = entry.span, o.first_positions = first;
    o.score = mask_for_reference(shape, call, entry.mask, entry.score, o.first_position);
    return reference::full_softmax(call.q, call.k, call.v, o);
  }
};

template <class T>
law_operator<T> operator_of(const full_softmax_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.causal = entry.causal && !entry.mask && !entry.skips;  // law 5 speaks of positions that end with the keys
  op.averages = !entry.sinks;
  op.invariant = op.invariant_stream = op.invariant_backward = !entry.skips;
  op.queries_alone = !entry.bias && !entry.mask && !entry.score && !entry.span;
  op.bind = [entry](const law_shape& shape) -> bound<T> {
    return [p = std::make_shared<parameters<T>>(entry, shape)](const law_call<T>& call) {
      compiled_full_softmax<T>::call(call.q, call.k, call.v, call.out,
                                     p->options(call), p->score, *call.execution);
    };
  };
  op.backward = [entry](const law_shape& shape) {
    auto p = std::make_shared<parameters<T>>(entry, shape);
    auto d_slopes = std::make_shared<std::vector<T>>(p->slopes), d_sinks = std::make_shared<std::vector<T>>(p->sinks);
    auto d_bias = std::make_shared<tensor<T>>(p->bias), d_relative = std::make_shared<tensor<T>>(p->relative),
         d_keys = std::make_shared<tensor<T>>(p->relative_keys), d_decay = std::make_shared<tensor<T>>(p->decay),
         d_queries = std::make_shared<tensor<T>>(p->position_queries);
    return [=](const law_backward_call<T>& call) {
      attn::full_softmax_gradients<T> g{.q = call.dq, .k = call.dk, .v = call.dv};
      if (entry.alibi || entry.skips) g.alibi_slopes = *d_slopes;
      if (entry.sinks) g.sinks = *d_sinks;
      if (entry.bias) g.bias = view(*d_bias);
      if (entry.relative) g.relative_keys = {d_keys->data.data(), {d_keys->heads(), 15, d_keys->dim()}};
      if (entry.relative) g.position_queries = {d_queries->data.data(), {d_queries->heads(), 7, d_queries->dim()}};
      if (entry.relative)
        g.relative_bias = {d_relative->data.data(), {d_relative->length(), d_relative->dim()}};
      if (entry.forgets) g.log_decay = row_view(*d_decay);
      compiled_full_softmax<T>::backward(call.q, call.k, call.v, call.out, call.d_out, g, p->options(call), p->score,
                                         own_score_backward<T>, *call.execution);
      call.give(*d_slopes, *d_sinks, d_bias->data, d_relative->data, d_keys->data, d_queries->data, d_decay->data);
    };
  };
  op.reference = [entry](const law_shape& shape) {
    return [p = std::make_shared<parameters<T>>(entry, shape)](const law_reference_call& call) {
      return p->reference_of(call);
    };
  };
  if (!entry.skips) op.sees = [entry](const law_shape& s, idx_t b, idx_t h, idx_t i, idx_t j) {
    if (entry.bias && std::isinf(bias_value<T>(s.first_batch + b, s.first_head + h, i, j))) return false;
    if (entry.mask && !(mask_sees(s.first_batch + b, s.first_head + h, i, j) && key_mask_sees(s.first_batch + b, j)))
      return false;
    const idx_t tokens = entry.span ? (j + 1) * entry.span - 1 : j;
    return !entry.causal || tokens <= i + (entry.mask ? first_position : s.keys - s.queries);
  };
  if (entry.span)
    op.stream = [entry](const law_shape& shape) -> bound<T> {
      auto feed = std::make_shared<span_feed<T>>(shape, entry.span);
      return [feed, p = std::make_shared<parameters<T>>(entry, shape)](const law_call<T>& call) {
        auto options = p->cached_options(call);
        feed->append(call), options.first_position = feed->first;
        compiled_full_softmax<T>::cached(feed->cache, call.q, call.out, options, *call.execution);
      };
    };
  else if (op.causal && !entry.bias)
    op.stream = [entry](const law_shape& shape) -> bound<T> {
      auto cache = std::make_shared<attn::kv_cache<T>>(attn::state_extents{
          .batch = shape.batch, .heads = shape.kv_heads, .dim = shape.dim, .value_dim = shape.value_dim});
      cache->reserve(shape.queries);
      return [cache, p = std::make_shared<parameters<T>>(entry, shape)](const law_call<T>& call) {
        compiled_full_softmax<T>::step(*cache, call.q, call.k, call.v, call.out, p->options(call), p->score,
                                       *call.execution);
      };
    };
  return op;
}

// A cache of all keys.
template <class T>
binder<T> bind_cached(const full_softmax_entry& entry) {
  return [entry](const law_shape& s) -> bound<T> {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_call<T>& call) {
      attn::kv_cache<T> cache({.batch = p->shape.batch, .heads = p->shape.kv_heads, .dim = p->shape.dim,
                               .value_dim = p->shape.value_dim});
      cache.append(call.k, call.v);
      compiled_full_softmax<T>::cached(cache, call.q, call.out, p->cached_options(call), *call.execution);
    };
  };
}

template <class T>
void add_full_softmax(std::vector<law_operator<T>>& all) {
  for (const full_softmax_entry& entry : {full_softmax_entry{"full_softmax"},
                                          {"full_softmax causal", true},
                                          {.name = "full_softmax with bias", .bias = true},
                                          {.name = "full_softmax causal with bias, relative bias and keys",
                                          .causal = true,
                                          .bias = true,
                                          .relative = true},
                                          {.name = "full_softmax with a score function", .score = true},
                                          {.name = "full_softmax causal, softcap, ALiBi, sinks, relative bias and keys",
                                          .causal = true,
                                          .softcap = true,
                                          .alibi = true,
                                          .sinks = true,
                                          .relative = true},
                                          {.name = "full_softmax with sinks", .sinks = true},
                                          {.name = "full_softmax causal, forgetting, sinks",
                                          .causal = true,
                                          .sinks = true,
                                          .forgets = true},
                                          {.name = "full_softmax masked by pair and key, scaled, ALiBi, from a position on",
                                          .causal = true,
                                          .alibi = true,
                                          .mask = true},
                                          {.name = "full_softmax causal, without what is far below",
                                          .causal = true,
                                          .skips = true},
                                          {.name = "full_softmax causal, keys of 3 tokens, sinks",
                                          .causal = true,
                                          .sinks = true,
                                          .span = 3}})
    all.push_back(operator_of<T>(entry));
  law_operator<T>& plain = all[all.size() - 11];
  plain.long_rows = {{"all keys", plain.bind, plain.backward}};
  const full_softmax_entry causal{.name = "", .causal = true, .sinks = true},
      placed{.name = "", .causal = true, .sinks = true, .span = 1};
  all.back().limits = {same_form<T>("a token a key", operator_of<T>(placed), operator_of<T>(causal)),
                       {"a token a key of a cache", bind_cached<T>(placed), bind_cached<T>(causal), true}};
}
const law_entries entries("full_softmax", [](auto& all) { add_full_softmax(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  const auto nothing = [](auto&) {};
  all.push_back(stored_softmax<compiled_full_softmax, S>("full_softmax", false, nothing));
  all.push_back(stored_softmax<compiled_full_softmax, S>("full_softmax causal", true, nothing));
  all.push_back(stored_softmax<compiled_full_softmax, S>("full_softmax causal, keys of 3 tokens", true,
                                                         [](auto& o) { o.span = 3, o.first_position = 0; }));
}
const stored_entries stored_form("full_softmax", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::full_softmax_law
