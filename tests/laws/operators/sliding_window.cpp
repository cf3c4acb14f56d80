#include "reference/sliding_window.hpp"
#include "laws/operators/mask.hpp"
#include "laws/stored.hpp"

namespace testing::sliding_window_law {
namespace {

struct sliding_window_entry {
  std::string name;
  idx_t left = 0, right = 0;
  bool causal = false;
  std::vector<idx_t> dilation{}, globals{};  // a dilation per head: head h takes entry h of the cycle
  bool own_projections = false;
  bool scores = false;  // softcap, sinks, ALiBi, relative bias, scale
  bool mask = false;    // and a score function, and where the first query is
  bool forgets = false;
  bool skips = false;  // and slopes by which what is far away is left out
};
constexpr idx_t first_position = 2;

// The numbers of a larger tensor at the place where this shape stands in it.
template <class T>
tensor<T> own_projection(std::uint64_t seed, const law_shape& s, idx_t first_head, idx_t heads, idx_t length,
                         idx_t dim) {
  tensor<T> x(s.batch, heads, length, dim);
  for (idx_t b = 0; b < s.batch; ++b)
    for (idx_t h = 0; h < heads; ++h)
      for (idx_t i = 0; i < length; ++i) {
        random_source random(seed + static_cast<std::uint64_t>(((s.first_batch + b) * 16 + first_head + h) * 1000 + i));
        for (idx_t d = 0; d < dim; ++d) x(b, h, i, d) = static_cast<T>(random.normal());
      }
  return x;
}

template <class T>
struct parameters {
  sliding_window_entry entry;
  std::vector<idx_t> dilation;
  law_shape shape;
  std::vector<T> slopes, sinks;
  tensor<T> q_global, k_global, v_global, relative, relative_keys, position_queries, decay;
  law_mask mask;
  std::vector<std::uint8_t> key_mask;  // [B, Lk]
  score_of<T> score;

  parameters(const sliding_window_entry& e, const law_shape& s) : entry(e), dilation(e.dilation), shape(s) {
    if (e.dilation.size() > 1) {
      dilation.clear();
      for (idx_t h = 0; h < s.heads; ++h)
        dilation.push_back(e.dilation[static_cast<std::size_t>(s.first_head + h) % e.dilation.size()]);
    }
    if (e.scores) relative_keys = law_relative_keys<T>(s), position_queries = law_position_queries<T>(s);
    if (e.scores) slopes = law_slopes<T>(s), sinks = law_sinks<T>(s), relative = law_relative_bias<T>(s);
    if (e.mask) mask = law_mask(s), key_mask = law_key_mask(s), score = own_score_of<T>(s);
    if (e.forgets) decay = law_log_decay<T>(s);
    if (e.skips) slopes = law_steep_slopes<T>(s);
    if (!e.own_projections) return;
    const idx_t first_kv_head = s.first_head / 2;  // two query heads share one
    q_global = own_projection<T>(1, s, s.first_head, s.heads, s.queries, s.dim);
    k_global = own_projection<T>(2, s, first_kv_head, s.kv_heads, s.keys, s.dim);
    v_global = own_projection<T>(3, s, first_kv_head, s.kv_heads, s.keys, s.value_dim);
  }

  attn::sliding_window_options<T> options(const auto& call) const {
    attn::sliding_window_options<T> o;
    o.left = entry.left, o.right = entry.right, o.causal = entry.causal;
    o.dilation = dilation, o.global_positions = entry.globals;
    call.set_lengths(o);
    o.lse = call.lse;
    if (entry.scores) o.softcap = T(2), o.scale = T(0.3);
    o.alibi_slopes = slopes, o.sinks = sinks, o.relative_bias = table_view(relative);
    if (entry.mask) o.mask = mask.view(), o.first_position = first_position;
    if (entry.mask) o.key_mask = attn::tensor_view<const std::uint8_t, 2>(key_mask.data(), {shape.batch, shape.keys});
    if (entry.scores) {
      o.relative_keys = {relative_keys.data.data(), {shape.heads, 15, shape.dim}};
      o.position_queries = {position_queries.data.data(), {shape.heads, 7, shape.dim}};
    }
    if (entry.forgets) o.log_decay = {decay.data.data(), {decay.batch(), decay.heads(), decay.length()}};
    if (entry.own_projections) o.q_global = view(q_global), o.k_global = view(k_global), o.v_global = view(v_global);
    if (entry.skips) o.skip_below = law_skip_below<T>;
    return o;
  }
  reference::result reference_of(const law_reference_call& call) const {
    reference::sliding_window_options o;
    o.left = entry.left, o.right = entry.right, o.causal = entry.causal;
    o.dilation = dilation, o.global_positions = entry.globals;
    call.set_lengths(o);
    if (entry.scores) o.softcap = 2, o.scale = static_cast<double>(T(0.3));
    o.alibi_slopes = call.parameter(slopes), o.sinks = call.parameter(sinks);
    o.q_global = call.parameter(q_global), o.k_global = call.parameter(k_global);
    o.v_global = call.parameter(v_global);
    o.relative_bias = call.parameter(relative), o.log_decay = call.parameter(decay);
    o.relative_keys = call.parameter(relative_keys), o.position_queries = call.parameter(position_queries);
    if (entry.mask) o.key_mask = key_mask_for_reference(key_mask, shape);
    if (entry.mask) o.first_position = first_position;
    o.score = mask_for_reference(shape, call, entry.mask, entry.mask, o.first_position);
    return reference::sliding_window(call.q, call.k, call.v, o);
  }
};

bool sees(const sliding_window_entry& entry, const law_shape& s, idx_t b, idx_t h, idx_t i, idx_t j) {
  if (entry.mask && !(mask_sees(s.first_batch + b, s.first_head + h, i, j) && key_mask_sees(s.first_batch + b, j)))
    return false;
  reference::sliding_window_options o;
  o.left = entry.left, o.right = entry.right, o.global_positions = entry.globals;
  if (!entry.dilation.empty())
    o.dilation = {entry.dilation[static_cast<std::size_t>(s.first_head + h) % entry.dilation.size()]};
  const idx_t position = i + (entry.mask ? first_position : s.keys - s.queries);
  const bool global_query = reference::is_global(o, 0, position);
  if (entry.causal && j > position) return false;
  if (global_query) return !entry.own_projections;  // else it reads k_global and v_global
  return reference::is_global(o, 0, j) || reference::in_window(o, 0, j - position);
}

template <class T>
bound<T> bind_window(const sliding_window_entry& entry, const law_shape& shape) {
  return [p = std::make_shared<parameters<T>>(entry, shape)](const law_call<T>& call) {
    compiled_sliding_window<T>::call(call.q, call.k, call.v, call.out, p->options(call), p->score,
                                     *call.execution);
  };
}

template <class T>
backward_binder<T> window_backward(const sliding_window_entry& entry) {
  return [entry](const law_shape& shape) {
    struct memory {
      parameters<T> given;
      std::vector<T> slopes, sinks;
      tensor<T> q_global, k_global, v_global, relative, keys, queries, decay;
    };
    auto m = std::make_shared<memory>(memory{parameters<T>(entry, shape), {}, {}, {}, {}, {}, {}, {}, {}, {}});
    m->slopes = m->given.slopes, m->sinks = m->given.sinks, m->relative = m->given.relative;
    m->decay = m->given.decay, m->keys = m->given.relative_keys;
    m->queries = m->given.position_queries;
    m->q_global = m->given.q_global, m->k_global = m->given.k_global, m->v_global = m->given.v_global;
    return [m](const law_backward_call<T>& call) {
      const sliding_window_entry& e = m->given.entry;
      attn::sliding_window_gradients<T> g{.q = call.dq, .k = call.dk, .v = call.dv};
      if (e.scores || e.skips) g.alibi_slopes = m->slopes;
      if (e.scores) {
        g.sinks = m->sinks;
        g.relative_keys = {m->keys.data.data(), {m->keys.heads(), 15, m->keys.dim()}};
        g.position_queries = {m->queries.data.data(), {m->queries.heads(), 7, m->queries.dim()}};
        g.relative_bias = {m->relative.data.data(), {m->relative.length(), m->relative.dim()}};
      }
      if (e.forgets) g.log_decay = row_view(m->decay);
      if (e.own_projections)
        g.q_global = view(m->q_global), g.k_global = view(m->k_global), g.v_global = view(m->v_global);
      compiled_sliding_window<T>::backward(call.q, call.k, call.v, call.out, call.d_out, g, m->given.options(call),
                                           m->given.score, own_score_backward<T>, *call.execution);
      call.give(m->slopes, m->sinks, m->q_global.data, m->k_global.data, m->v_global.data,
                m->relative.data, m->keys.data, m->queries.data, m->decay.data);
    };
  };
}

template <class T>
bound<T> bind_full(bool causal) {
  return [causal](const law_call<T>& call) {
    attn::full_softmax_options<T> options;
    options.causal = causal;
    call.set_lengths(options);
    options.lse = call.lse;
    compiled_full_softmax<T>::call(call.q, call.k, call.v, call.out, options, {}, *call.execution);
  };
}

template <class T>
bound<T> stream_window(const sliding_window_entry& entry, const law_shape& shape) {
  struct state {
    parameters<T> p;
    attn::sliding_window_cache<T> cache;
  };
  const parameters<T> p(entry, shape);
  const auto all = p.options(law_call<T>{});
  const attn::sliding_window_cache_options window{all.left, all.dilation, all.global_positions};
  auto shared = std::make_shared<state>(state{
      p, attn::sliding_window_cache<T>(
             {.batch = shape.batch, .heads = shape.kv_heads, .dim = shape.dim, .value_dim = shape.value_dim}, window)});
  return [shared](const law_call<T>& call) {
    const auto chosen = shared->p.options(call);
    attn::sliding_window_step_options<T> options;
    call.set_lengths(options);
    options.scale = chosen.scale, options.softcap = chosen.softcap, options.lse = chosen.lse;
    options.alibi_slopes = chosen.alibi_slopes, options.sinks = chosen.sinks;
    options.relative_bias = chosen.relative_bias, options.relative_keys = chosen.relative_keys;
    options.position_queries = chosen.position_queries;
    if (chosen.log_decay) options.log_decay = chosen.log_decay.slice(2, 0, shared->cache.tokens() + call.k.extent(2));
    compiled_sliding_window<T>::step(shared->cache, call.q, call.k, call.v, call.out, options, {}, *call.execution);
  };
}

template <class T>
law_operator<T> operator_of(const sliding_window_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.causal = entry.causal && !entry.skips;
  op.averages = !entry.scores && !entry.own_projections;
  op.invariant = !entry.skips;  // but for steps over a ring, and gradients of global positions
  op.invariant_backward = entry.globals.empty();
  op.queries_alone = !entry.mask && !entry.own_projections;
  op.cross = !entry.own_projections;  // `sees` speaks of k and v alone
  op.bind = [entry](const law_shape& shape) { return bind_window<T>(entry, shape); };
  op.backward = window_backward<T>(entry);
  op.reference = [entry](const law_shape& shape) {
    return [p = std::make_shared<parameters<T>>(entry, shape)](const law_reference_call& call) {
      return p->reference_of(call);
    };
  };
  if (!entry.skips)
    op.sees = [entry](const law_shape& s, idx_t b, idx_t h, idx_t i, idx_t j) { return sees(entry, s, b, h, i, j); };
  if (op.causal && entry.left != attn::unlimited && !entry.own_projections)
    op.stream = [entry](const law_shape& shape) { return stream_window<T>(entry, shape); };
  return op;
}

// Windows that reach over the whole length, by number or without limit.
template <class T>
std::vector<law_limit<T>> window_limits() {
  std::vector<law_limit<T>> limits;
  for (bool causal : {false, true}) {
    const auto full = [causal](const law_shape&) { return bind_full<T>(causal); };
    const auto window = [causal](idx_t left, idx_t right, const law_shape& shape) {
      sliding_window_entry entry;
      entry.left = left, entry.right = right, entry.causal = causal;
      return bind_window<T>(entry, shape);
    };
    limits.push_back({causal ? "window of the length, causal" : "window of the length",
                      [window](const law_shape& s) { return window(s.keys, s.keys, s); }, full});
    limits.push_back({causal ? "unlimited window, causal" : "unlimited window",
                      [window](const law_shape& s) { return window(attn::unlimited, attn::unlimited, s); }, full});
  }
  limits.push_back({"every position global",
                    [](const law_shape& s) {
                      sliding_window_entry entry;
                      for (idx_t j = 0; j < s.keys; ++j) entry.globals.push_back(j);
                      return bind_window<T>(entry, s);
                    },
                    [](const law_shape&) { return bind_full<T>(false); }});
  return limits;
}

template <class T>
void add_sliding_window(std::vector<law_operator<T>>& all) {
  const std::vector<idx_t> some = {0, 5, 64, 200};
  const sliding_window_entry entries[] = {
      {.name = "sliding_window", .left = 5, .right = 3},
      {.name = "sliding_window causal", .left = 40, .right = 0, .causal = true},
      {.name = "sliding_window dilated", .left = 4, .right = 9, .dilation = {3}},
      {.name = "sliding_window dilated per head, causal",
       .left = 6,
       .right = 2,
       .causal = true,
       .dilation = {1, 4, 2, 7}},
      {.name = "sliding_window with global tokens", .left = 8, .right = 8, .globals = some},
      {.name = "sliding_window with global tokens, causal", .left = 8, .causal = true, .globals = some},
      {.name = "sliding_window with own projections", .left = 8, .right = 2, .globals = some, .own_projections = true},
      {.name = "sliding_window of everything",
       .left = 7,
       .right = 7,
       .causal = true,
       .dilation = {1, 4, 2, 7},
       .globals = some,
       .scores = true},
      {.name = "sliding_window with global tokens, dilated per head, forgetting",
       .left = 9,
       .causal = true,
       .dilation = {1, 4, 2, 7},
       .globals = some,
       .forgets = true},
      {.name = "sliding_window unlimited to the left, dilated",
       .left = attn::unlimited,
       .causal = true,
       .dilation = {6}},
      {.name = "sliding_window causal, without what is far below", .left = 190, .causal = true, .skips = true},
      {.name = "sliding_window masked by pair and key, with a score function, from a position on",
       .left = 9,
       .right = 4,
       .globals = some,
       .mask = true},
  };
  for (const auto& entry : entries) all.push_back(operator_of<T>(entry));
  all[all.size() - std::size(entries)].limits = window_limits<T>();
  const sliding_window_entry unlimited{.name = "", .left = attn::unlimited, .right = attn::unlimited};
  all.back().long_rows.push_back({"unlimited window", [=](const law_shape& s) { return bind_window<T>(unlimited, s); },
                                  window_backward<T>(unlimited)});
  const auto global = [](const law_shape& s) {
    sliding_window_entry entry{.name = "", .left = 1, .right = 1};
    for (idx_t i = 0; i < s.queries; ++i) entry.globals.push_back(s.keys - s.queries + i);
    return entry;
  };
  all.back().long_rows.push_back({"global queries", [=](const law_shape& s) { return bind_window<T>(global(s), s); },
                                  [=](const law_shape& s) { return window_backward<T>(global(s))(s); }});
}
const law_entries entries("sliding_window", [](auto& all) { add_sliding_window(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  all.push_back(
      stored_softmax<compiled_sliding_window, S>("sliding_window causal", true, [](auto& o) { o.left = 21; }));
}
const stored_entries stored_form("sliding_window", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::sliding_window_law
