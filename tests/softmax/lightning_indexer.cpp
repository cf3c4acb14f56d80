// lightning_indexer against its reference: every option, ties, numbers that are none, all types, its scores and their
// gradients, refusals.
#include <attn/softmax/lightning_indexer_backward.hpp>

#include "reference/lightning_indexer.hpp"
#include "support/call.hpp"
#include "support/catch.hpp"
#include "support/gradient.hpp"
#include "support/measure.hpp"
#include "support/refusal.hpp"
#include "support/run.hpp"

namespace testing::lightning_indexer_tests {
namespace {

struct indexer_problem {
  tensor<double> q, k;
  reference::indexer_options options;
};

template <class S>
struct library_call {
  tensor<S> q, k;
  tensor<real<S>> w;
  attn::lightning_indexer_options<S> options;

  explicit library_call(const indexer_problem& p)
      : q(cast<S>(p.q)), k(cast<S>(p.k)), w(cast<real<S>>(p.options.w)) {
    const auto& o = p.options;
    if (o.scale) options.scale = static_cast<real<S>>(*o.scale);
    options.causal = o.causal, options.topk = o.topk;
    options.lengths = o.lengths, options.query_lengths = o.query_lengths, options.key_lengths = o.key_lengths;
    options.activation = o.relu ? attn::indexer_activation::relu : attn::indexer_activation::none;
    options.span = o.span, options.block = o.block, options.per_head = o.per_head, options.tail = o.tail;
    options.local_blocks = o.local_blocks, options.first_blocks = o.first_blocks;
    if (!o.first_position.empty()) options.first_position = p.options.first_position;
    if (!w.empty()) options.w = {w.data.data(), {w.heads(), w.length(), w.dim()}};
  }
  library_call(const library_call&) = delete;

  tensor<idx_t> run(attn::execution& exec) {
    tensor<idx_t> indices(q.batch(), options.per_head ? q.heads() : 1, q.length(), options.topk + options.tail, 99);
    attn::lightning_indexer(view(q), view(k), attn::tensor_view<idx_t>(indices.data.data(), indices.extents), options,
                            exec);
    return indices;
  }
};

// Small integers: sums are exact, and many scores equal.
indexer_problem whole_numbers(idx_t batch, idx_t heads, idx_t queries, idx_t keys, idx_t dim, idx_t topk,
                              std::uint64_t seed, bool weighted) {
  indexer_problem p{tensor<double>(batch, heads, queries, dim), tensor<double>(batch, 1, keys, dim), {}};
  random_source random(seed);
  const auto fill = [&random](tensor<double>& x, idx_t most) {
    for (double& number : x.data) number = static_cast<double>(random.below(2 * most + 1) - most);
  };
  fill(p.q, 2), fill(p.k, 2);
  if (weighted) p.options.w = tensor<double>(1, batch, queries, heads), fill(p.options.w, 3);
  p.options.topk = topk, p.options.scale = 0.5;
  return p;
}

template <class S>
void check(const indexer_problem& p) {
  attn::execution serial, three(3, 0);
  library_call<S> call(p);
  const tensor<idx_t> wanted = reference::lightning_indexer(p.q, p.k, p.options);
  CHECK(call.run(serial) == wanted);
  CHECK(call.run(three) == wanted);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("lightning_indexer: options, lengths and ties", "[lightning_indexer]", all_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 65, 130, 257, 1200};
  std::uint64_t seed = 1;
  for (idx_t keys : lengths)
    for (idx_t topk : {1, 3, 20, 100, 2000}) {
      const idx_t queries = keys < 300 ? keys : 30;
      indexer_problem p =
          whole_numbers(2, 1 + static_cast<idx_t>(seed % 5), queries, keys, 1 + static_cast<idx_t>(seed * 7 % 40), topk,
                        seed, seed % 3 != 0);
      p.options.causal = seed % 2, p.options.relu = seed % 4 < 2;
      if (seed % 5 == 0) p.options.query_lengths = {queries, queries / 2}, p.options.key_lengths = {keys / 3, keys};
      CAPTURE(queries, keys, topk, seed);
      check<TestType>(p);
      ++seed;
    }
  check<TestType>(whole_numbers(0, 2, 3, 3, 4, 2, 1, false));
  check<TestType>(whole_numbers(1, 0, 3, 3, 4, 2, 1, false));
  check<TestType>(whole_numbers(1, 2, 40, 3, 4, 2, 1, false));
}

TEMPLATE_LIST_TEST_CASE("lightning_indexer: blocks, lists for each head, keys of several tokens", "[lightning_indexer]",
                        all_types) {
  std::uint64_t seed = 1;
  for (idx_t keys : {0, 1, 7, 64, 65, 257, 1200})
    for (idx_t block : {1, 3, 8, 70, 2000}) {
      const idx_t queries = std::min<idx_t>(keys, 40), topk = 3 + static_cast<idx_t>(seed % 4) * 5;
      indexer_problem p = whole_numbers(2, 1 + static_cast<idx_t>(seed % 5), queries, keys, 9, topk, seed, seed % 3 != 0);
      auto& o = p.options;
      o.block = block, o.per_head = seed % 2, o.causal = seed % 5 != 0, o.relu = seed % 4 < 2;
      o.local_blocks = static_cast<idx_t>(seed % 3), o.first_blocks = static_cast<idx_t>(seed / 3 % 2);
      if (seed % 4 == 1) o.query_lengths = {queries, queries / 2}, o.key_lengths = {keys / 3, keys};
      if (seed % 7 == 2) o.first_position = {keys / 2 - 3, -2};
      CAPTURE(keys, block, topk, seed);
      check<TestType>(p);
      ++seed;
    }
  for (idx_t span : {1, 2, 4, 16})
    for (bool tail : {false, true}) {
      const idx_t queries = 45, keys = 50 / span + 2;  // some are of tokens to come
      indexer_problem p = whole_numbers(2, 3, queries, keys, 9, 4, seed++, true);
      auto& o = p.options;
      o.span = span, o.tail = tail && span > 1, o.causal = true, o.per_head = span == 4;
      o.first_position = tail ? std::vector<idx_t>{-3, 5} : std::vector<idx_t>{2};
      if (tail) o.query_lengths = {queries, 30}, o.key_lengths = {keys, keys - 2};
      CAPTURE(span, tail);
      check<TestType>(p);
    }
  // All names are forced ones.
  indexer_problem p = whole_numbers(1, 2, 30, 30, 9, 3, 77, false);
  p.options.block = 4, p.options.local_blocks = 2, p.options.first_blocks = 1, p.options.causal = true;
  check<TestType>(p);
}

TEMPLATE_LIST_TEST_CASE("lightning_indexer: scores, and what is not a number", "[lightning_indexer]", exact_types) {
  using S = TestType;
  indexer_problem p{random_normal(1, 1, 3, 40, 9), random_normal(2, 1, 1, 300, 9), {}};
  p.options.topk = 50, p.options.causal = true, p.options.w = random_normal(3, 1, 1, 40, 3);
  library_call<S> call(p);
  tensor<S> scores(1, 1, 40, 50);
  call.options.scores = view(scores);
  attn::execution serial;
  const tensor<idx_t> indices = call.run(serial);
  const tensor<double> q = cast<double>(call.q), k = cast<double>(call.k);
  p.options.w = cast<double>(call.w);
  double worst = 0;
  for (idx_t i = 0; i < 40; ++i)
    for (idx_t n = 0; n < 50; ++n)
      worst = std::max(worst, std::abs(reference::index_score(q, k, p.options, 0, i, indices(0, 0, i, n)) -
                                       static_cast<double>(scores(0, 0, i, n))));
  CHECK(worst <= 20 * tolerance<S>::out);

  // Those of blocks, the forced ones among them.
  call.options.block = 3, call.options.local_blocks = 2, call.options.first_blocks = 1, call.options.per_head = true;
  call.options.topk = 10;
  p.options.block = 3;
  tensor<S> of_blocks(1, 3, 40, 10);
  call.options.scores = view(of_blocks);
  const tensor<idx_t> blocks = call.run(serial);
  worst = 0;
  for (idx_t h = 0; h < 3; ++h)
    for (idx_t i = 0; i < 40; ++i)
      for (idx_t n = 0; n < 10; ++n) {
        const idx_t best = reference::best_of_block(q, k, p.options, 0, i, blocks(0, h, i, n), i + 261, h);
        worst = std::max(worst, std::abs(reference::index_score(q, k, p.options, 0, i, best, h) -
                                         static_cast<double>(of_blocks(0, h, i, n))));
      }
  CHECK(worst <= 20 * tolerance<S>::out);
  call.options.block = 1, call.options.local_blocks = call.options.first_blocks = 0, call.options.per_head = false;

  // Keys that are no numbers are chosen when there are no others; they change nothing else.
  for (idx_t d = 0; d < 9; ++d) call.k(0, 0, 17, d) = std::numeric_limits<S>::quiet_NaN();
  call.options.topk = 299, call.options.scores = {};
  const tensor<idx_t> with = call.run(serial);
  for (idx_t n = 0; n < 299; ++n)
    if (with(0, 0, 39, n) == 17) FAIL_CHECK("a score that is no number was preferred");
  for (S& x : call.k.data) x = std::numeric_limits<S>::quiet_NaN();
  call.options.topk = 3;
  const tensor<idx_t> none = call.run(serial);
  for (idx_t i = 0; i < 40; ++i)
    for (idx_t n = 0; n < 3; ++n) CHECK(none(0, 0, i, n) == n);
}

TEMPLATE_LIST_TEST_CASE("lightning_indexer_backward: against the reverse pass of the reference", "[lightning_indexer]",
                        all_types) {
  using S = TestType;
  // The last four: blocks, blocks for each head, keys of 4 tokens, one block of any size.
  for (int choice = 0; choice < 20; ++choice) {
    const bool causal = choice & 1 || choice >= 16, relu = choice & 2, weighted = choice & 4 || choice >= 16,
               lengths = choice & 8, one_block = choice == 19, blocks = choice == 16 || choice == 17 || one_block;
    CAPTURE(choice, causal, relu, weighted, lengths);
    const idx_t queries = 37, keys = 150, topk = 11, index_heads = 5, width = choice % 3 ? 9 : 16;
    indexer_problem p{rounded<S>(random_normal(1, 2, index_heads, queries, width)),
                      rounded<S>(random_normal(2, 2, 1, keys, width)), {}};
    p.options.causal = causal, p.options.relu = relu, p.options.topk = topk;
    if (blocks) p.options.block = 5, p.options.local_blocks = 2, p.options.per_head = choice == 17;
    if (one_block) p.options.block = std::numeric_limits<idx_t>::max();
    if (choice == 18) p.options.span = 4, p.options.tail = true, p.options.first_position = {100};
    const idx_t lists = p.options.per_head ? index_heads : 1, entries = topk + p.options.tail;
    if (weighted) p.options.w = rounded<real<S>>(random_normal(3, 1, 2, queries, index_heads));
    if (lengths) p.options.query_lengths = {queries, 20}, p.options.key_lengths = {140, 60};
    library_call<S> call(p);
    attn::execution serial, three(3, 0);
    const tensor<idx_t> indices = call.run(serial);
    gradient_case c;
    c.names = {"q", "k"}, c.inputs = {p.q, p.k};
    if (weighted) c.names.push_back("w"), c.inputs.push_back(p.options.w);
    c.forward = [&](const std::vector<tensor<variable>>& in) {
      reference::basic_indexer_options<variable> o;
      o.relu = relu, o.block = p.options.block, o.span = p.options.span, o.causal = causal;
      o.first_position = p.options.first_position;
      if (weighted) o.w = in[2];
      tensor<variable> scores(2, lists, queries, entries);
      for (idx_t b = 0; b < 2; ++b)
        for (idx_t list = 0; list < lists; ++list)
          for (idx_t i = 0; i < queries; ++i) {
            const idx_t of_item = lengths ? p.options.query_lengths[static_cast<std::size_t>(b)] : queries,
                        to = lengths ? p.options.key_lengths[static_cast<std::size_t>(b)] : keys,
                        seen = reference::index_end(o, reference::index_position(o, b, i, of_item, to), to);
            for (idx_t n = 0; n < entries; ++n)
              if (const idx_t name = indices(b, list, i, n); name >= 0 && name * o.block < seen) {
                const idx_t head = p.options.per_head ? list : -1,
                            j = reference::best_of_block(in[0], in[1], o, b, i, name, seen, head);
                scores(b, list, i, n) = reference::index_score(in[0], in[1], o, b, i, j, head);
              }
          }
      return std::vector<tensor<variable>>{scores};
    };
    check_gradients(
        c, product_gradient_tolerance<S>,
        [&](const tensors&, const tensors& d_results) {
          const tensor<real<S>> d = cast<real<S>>(d_results[0]);
          const auto run = [&](attn::execution& exec) {
            tensor<S> dq(2, index_heads, queries, width, S(7)), dk(2, 1, keys, width, S(7));
            tensor<real<S>> dw(1, 2, queries, index_heads, real<S>(7));
            attn::lightning_indexer_gradients<S> g{.q = view(dq), .k = view(dk)};
            if (weighted) g.w = attn::tensor_view<real<S>, 3>(dw.data.data(), {2, queries, index_heads});
            attn::lightning_indexer_backward(view(call.q), view(call.k),
                                             attn::tensor_view<const idx_t>(indices.data.data(), indices.extents),
                                             view(d), g, call.options, exec);
            tensors all{cast<double>(dq), cast<double>(dk)};
            if (weighted) all.push_back(cast<double>(dw));
            return all;
          };
          const tensors alone = run(serial);
          CHECK(run(three) == alone);
          tensor<S> dq(2, index_heads, queries, width, S(7));  // of all items, where no other gradient is asked for
          attn::lightning_indexer_backward(view(call.q), view(call.k),
                                           attn::tensor_view<const idx_t>(indices.data.data(), indices.extents), view(d),
                                           {.q = view(dq)}, call.options, serial);
          CHECK(cast<double>(dq) == alone[0]);
          return alone;
        },
        [](tensors& d) { d[0] = rounded<real<S>>(d[0]); });
  }
}

TEST_CASE("lightning_indexer refuses what does not fit", "[lightning_indexer]") {
  const tensor<float> q(2, 3, 5, 4, 1), k(2, 1, 9, 4, 1), w(1, 2, 5, 3, 1), d(2, 1, 5, 2, 1);
  tensor<std::int32_t> found(2, 1, 5, 2, 7);
  const attn::tensor_view<std::int32_t> to(found.data.data(), found.extents);
  using options = attn::lightning_indexer_options<float>;
  const auto check = [&](const char* says, const char* name, auto&& call) {
    const std::string said = refusal(call);
    INFO(said << " should mention " << says);
    CHECK(well_formed(said, name));
    CHECK(said.find(says) != std::string::npos);
    for (std::int32_t x : found.data) CHECK(x == 7);
  };
  const auto refused = [&](const char* says, in_view<float> keys, attn::tensor_view<std::int32_t> indices,
                           const options& o) {
    check(says, "lightning_indexer", [&] { attn::lightning_indexer(view(q), keys, indices, o); });
  };
  refused("topk >= 1; found 0", view(k), to, {.topk = 0});
  refused("indices of shape", view(k), to, {.topk = 3});
  refused("indices of shape", view(k), to.slice(2, 0, 4), {.topk = 2});
  refused("key heads 1; found 3", view(q), to, {.topk = 2});
  refused("key batch", view(k).slice(0, 0, 1), to, {.topk = 2});
  refused("key dim", view(k).slice(3, 0, 3), to, {.topk = 2});
  refused("null", view(k), attn::tensor_view<std::int32_t>(nullptr, {2, 1, 5, 2}), {.topk = 2});
  float* const inside = reinterpret_cast<float*>(found.data.data());
  refused("overlap", view(k), to, {.topk = 2, .w = {inside, {2, 5, 3}, {0, 0, 1}}});
  refused("w heads = query heads 3; found 2", view(k), to, {.topk = 2, .w = {w.data.data(), {2, 5, 2}}});
  refused("scale", view(k), to, {.scale = HUGE_VALF, .topk = 2});
  struct wrong {
    const char* says;
    options o;
  };
  constexpr idx_t most = std::numeric_limits<idx_t>::max();
  const wrong of_both_passes[] = {
      {"block >= 1; found 0", {.topk = 2, .block = 0}},
      {"local_blocks >= 0; found -1", {.topk = 2, .local_blocks = -1}},
      {"first_blocks >= 0; found -1", {.topk = 2, .first_blocks = -1}},
      {"at most topk = 2 together; found 2 and 1", {.topk = 2, .local_blocks = 2, .first_blocks = 1}},
      {"at most topk = 2 together", {.topk = 2, .first_blocks = most}},
      {"span >= 1; found 0", {.causal = true, .first_position = 0, .span = 0, .topk = 2}},
      {"causal attention, since span is given", {.first_position = 0, .span = 2, .topk = 2}},
      {"first_position, since span is given", {.causal = true, .span = 2, .topk = 2}},
      {"a block of 1, since span is given; found 2",
       {.causal = true, .first_position = 0, .span = 2, .topk = 2, .block = 2}},
      {"neither local_blocks nor first_blocks",
       {.causal = true, .first_position = 0, .span = 2, .topk = 2, .local_blocks = 1}},
      {"span, since tail is given", {.topk = 2, .tail = true}}};
  for (const wrong& one : of_both_passes) refused(one.says, view(k), to, one.o);
  refused("[batch, heads, query length, topk] = [2, 3, 5, 2]", view(k), to, {.topk = 2, .per_head = true});
  tensor<std::int32_t> of_heads(2, 3, 5, 2, 7);
  refused("[batch, 1, query length, topk] = [2, 1, 5, 2]; found [2, 3, 5, 2]", view(k),
          {of_heads.data.data(), of_heads.extents}, {.topk = 2});
  refused("topk + 1] = [2, 1, 5, 3]", view(k), to,
          {.causal = true, .first_position = 0, .span = 2, .topk = 2, .tail = true});
  const std::vector<idx_t> places = {0, 1, 2};
  refused("first_position, one per batch item: 2; found 3", view(k), to, {.first_position = places, .topk = 2});
  refused("first_position from -2^40", view(k), to, {.first_position = idx_t(1) << 41, .topk = 2});
  const std::vector<idx_t> lengths = {5, 10};
  refused("key_lengths from 0 to 9; found 10", view(k), to, {.key_lengths = lengths, .topk = 2});

  tensor<float> dq(2, 3, 5, 4, 7), dw(1, 2, 5, 3, 7);
  tensor<idx_t> lists(2, 1, 5, 2, 3);
  const auto backward = [&](const char* says, in_view<float> d_scores, const options& o,
                            attn::lightning_indexer_gradients<float> g = {}) {
    check(says, "lightning_indexer_backward", [&] {
      g.q = view(dq);
      attn::lightning_indexer_backward(view(q), view(k), attn::tensor_view<idx_t>(lists.data.data(), lists.extents),
                                       d_scores, g, o);
    });
    for (float x : dq.data) CHECK(x == 7);
  };
  backward("d_scores of shape", view(d).slice(3, 0, 1), {.topk = 2});
  backward("indices of shape", view(d), {.topk = 3});
  backward("w, since its gradient is asked for", view(d), {.topk = 2},
           {.w = attn::tensor_view<float, 3>(dw.data.data(), {2, 5, 3})});
  for (const wrong& one : of_both_passes) backward(one.says, view(d), one.o);
  lists(0, 0, 0, 0) = 9;
  backward("keys from -1 to 8; found 9", view(d), {.topk = 2});
  backward("blocks from -1 to 4; found 9", view(d), {.topk = 2, .block = 2});
}

}  // namespace testing::lightning_indexer_tests
