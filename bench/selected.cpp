// Exact softmax over the keys that lists name, and the indexer that makes such lists.
#include <attn/core/tensor.hpp>
#include <attn/softmax/lightning_indexer_step.hpp>
#include <attn/softmax/selected_keys_backward.hpp>
#include <attn/softmax/selected_keys_step.hpp>

#include <algorithm>
#include <memory>

#include "cache_types.hpp"
#include "flops.hpp"
#include "inputs.hpp"
#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

using index_table = attn::tensor<std::int32_t>;

idx_t names_of(const problem& p, idx_t keys) { return (keys + p.set.list_block - 1) / p.set.list_block; }

/// A list of a query that sees `names` names: ascending, spread over them at random.
void draw_list(std::uint64_t& state, idx_t names, idx_t count, std::int32_t* list) {
  for (idx_t n = 0; n < count; ++n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const double place = (static_cast<double>(n) + static_cast<double>(state >> 40) * 0x1p-24) / double(count);
    list[n] = static_cast<std::int32_t>(names <= count ? (n < names ? n : -1) : idx_t(place * double(names)));
  }
}

/// One for every query and head, or one for all heads.
index_table draw_lists(const problem& p) {
  index_table lists({1, p.set.shared_lists ? 1 : p.heads, p.length, p.set.selected});
  std::uint64_t state = 1;
  for (idx_t h = 0; h < lists.extent(1); ++h)
    for (idx_t i = 0; i < p.length; ++i)
      draw_list(state, names_of(p, p.causal ? i + 1 : p.length), p.set.selected,
                lists.data() + (h * p.length + i) * p.set.selected);
  return lists;
}

double seen_keys(const problem& p, idx_t keys) {
  return static_cast<double>(std::min(p.set.selected * p.set.list_block, keys));
}
double selected_flops(const problem& p) {
  double scores = 0;
  for (idx_t i = 0; i < p.length; ++i) scores += seen_keys(p, p.causal ? i + 1 : p.length);
  return score_flops(p, scores);
}
double selected_backward_flops(const problem& p) { return five_for_two(selected_flops(p), p); }

/// Where all heads share lists they share a key head too.
template <class View>
View keys_of(const problem& p, const View& x) {
  return p.set.shared_lists ? x.slice(1, 0, 1) : x;
}
struct selected_problem {
  problem p;
  std::shared_ptr<const index_table> lists;

  explicit selected_problem(const problem& of) : p(of), lists(std::make_shared<const index_table>(draw_lists(of))) {}
  attn::selected_keys_options<element> options() const { return {.causal = p.causal, .block = p.set.list_block}; }
};

runner prepare_selected(const problem& p) {
  return [s = selected_problem(p)](input q, input k, input v, output out, attn::execution& exec) {
    attn::selected_keys(q, keys_of(s.p, k), keys_of(s.p, v), out, *s.lists, s.options(), exec);
  };
}
training_runner train_selected(const problem& p) {
  const selected_problem s(p);
  const auto options = [s](const training_views& x) {
    auto o = s.options();
    o.lse = x.lse;
    return o;
  };
  return {[=](const training_views& x, attn::execution& exec) {
            attn::selected_keys(x.q, keys_of(s.p, x.k), keys_of(s.p, x.v), x.out, *s.lists, options(x), exec);
          },
          [=](const training_views& x, attn::execution& exec) {
            attn::selected_keys_backward(x.q, keys_of(s.p, x.k), keys_of(s.p, x.v), x.out, *s.lists, x.d_out,
                                         {.q = x.dq, .k = keys_of(s.p, x.dk), .v = keys_of(s.p, x.dv)}, options(x),
                                         exec);
          }};
}

/// Four heads of 32 at most, as light as those of a model.
struct indexer_views {
  input q, k;
  attn::tensor_view<const real, 3> w;

  indexer_views(input of_q, input of_k)
      : q(of_q.slice(1, 0, std::min<idx_t>(4, of_q.extent(1))).slice(3, 0, std::min<idx_t>(32, of_q.extent(3)))),
        k(of_k.slice(1, 0, 1).slice(3, 0, std::min<idx_t>(32, of_k.extent(3)))),
        w(drawn_numbers<real>(role::parameter, std::size_t(q.extent(2) * q.extent(1))),
          {1, q.extent(2), q.extent(1)}) {}
};
double indexer_flops(const problem& p) {
  const auto n = static_cast<double>(p.length);
  return (p.causal ? n * (n + 1) : 2 * n * n) * double(std::min<idx_t>(4, p.heads) * std::min<idx_t>(32, p.dim));
}
runner prepare_indexer(const problem& p) {
  return [p, found = std::make_shared<index_table>(std::array<idx_t, 4>{1, 1, p.length, p.set.selected})](
             input q, input k, input, output, attn::execution& exec) {
    const indexer_views x(q, k);
    attn::lightning_indexer(x.q, x.k, *found, {.causal = p.causal, .topk = p.set.selected, .w = x.w}, exec);
  };
}

struct indexer_stream final : stream {
  attn::kv_cache<element> cache;
  index_table found;

  explicit indexer_stream(const problem& p)
      : cache({.dim = std::min<idx_t>(32, p.dim), .value_dim = 0}), found({1, 1, 1, p.set.selected}) {
    cache.reserve(p.length);
  }
  std::unique_ptr<stream> copy() const override { return std::make_unique<indexer_stream>(*this); }
  void feed(input k, input) override {
    const input index_keys = indexer_views(k, k).k;
    cache.append(index_keys, index_keys.slice(3, 0, 0));
  }
  void step(input q, input k, input, output, attn::execution& exec) override {
    const indexer_views x(q, k);
    attn::lightning_indexer_step(cache, x.q, x.k, found, {.topk = found.extent(3), .w = x.w}, exec);
  }
  void rewind(idx_t tokens) override { cache.truncate(tokens); }
};
double indexer_step_flops(const problem& p) {
  return static_cast<double>(2 * p.length * std::min<idx_t>(4, p.heads) * std::min<idx_t>(32, p.dim));
}
double indexer_cache_bytes(const problem& p) {
  return static_cast<double>(p.length * std::min<idx_t>(32, p.dim)) * sizeof(element);
}

/// Every step has other lists. C: elements of the cache.
template <class C>
struct selected_stream final : stream {
  static constexpr idx_t most_turns = 64;
  attn::kv_cache<elements_of<C>> cache;
  idx_t count, block, turn = 0;
  index_table lists;  // [1, heads, turns, count]

  explicit selected_stream(const problem& p)
      : cache({.heads = p.kv_heads, .dim = p.dim, .value_dim = p.dim_v}, {.rotate = rotates<C>}),
        count(p.set.selected), block(p.set.list_block), lists({1, p.kv_heads, most_turns, p.set.selected}) {
    cache.reserve(p.length);
  }
  std::unique_ptr<stream> copy() const override { return std::make_unique<selected_stream>(*this); }
  void feed(input k, input v) override {
    cache.append(k, v);
    std::uint64_t state = 2;
    for (idx_t n = 0; n < lists.extent(1) * most_turns; ++n)
      draw_list(state, (cache.tokens() + block - 1) / block, count, lists.data() + n * count);
  }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    const auto these = lists.view().slice(2, turn++ % most_turns, 1);
    attn::selected_keys_step(cache, q, k, v, out, these, {.block = block}, exec);
  }
  void rewind(idx_t tokens) override { cache.truncate(tokens); }
};
double selected_step_flops(const problem& p) { return score_flops(p, seen_keys(p, p.length)); }

}  // namespace

std::vector<decode_entry> selected_decoders() {
  std::vector<decode_entry> all;
  each_cache_type([&]<class C>(const char* name, double) {
    all.push_back(
        {.name = "selected_keys_decode",
         .exact = false,
         .uses = {"selected", "list-block"},
         .flops = selected_step_flops,
         .cache_bytes = [](const problem& p) { return seen_keys(p, p.length) * token_bytes<C>(p); },
         .prepare = [](const problem& p) -> std::unique_ptr<stream> { return std::make_unique<selected_stream<C>>(p); },
         .approximates = false,
         .state_bytes = [](const problem& p) { return static_cast<double>(p.length) * token_bytes<C>(p); },
         .reads_anew = true,
         .cache_type = name});
  });
  all.push_back(
      {.name = "lightning_indexer_decode",
       .exact = false,
       .uses = {"selected"},
       .flops = indexer_step_flops,
       .cache_bytes = indexer_cache_bytes,
       .prepare = [](const problem& p) -> std::unique_ptr<stream> { return std::make_unique<indexer_stream>(p); },
       .approximates = false});
  return all;
}

std::vector<operator_entry> selected_operators() {
  return {{.name = "selected_keys",
           .colour = "#4a6fa5",
           .cost = growth::quadratic,
           .has_causal = true,
           .exact = false,
           .uses = {"selected", "list-block", "shared-lists"},
           .flops = selected_flops,
           .prepare = prepare_selected,
           .approximates = false,
           .backward = {selected_backward_flops, train_selected}},
          {.name = "lightning_indexer",
           .colour = "#b0bec5",
           .cost = growth::quadratic,
           .has_causal = true,
           .exact = false,
           .uses = {"selected"},
           .flops = indexer_flops,
           .prepare = prepare_indexer,
           .approximates = false}};
}

}  // namespace bench::inline ATTN_BENCH_TYPE
