// Makers of lists of blocks against their references, a structure that they must find, the laws that lists obey, the
// cache, refusals: antidiagonal_blocks, min_max_blocks, vertical_slash_blocks.
#include <attn/softmax/antidiagonal_blocks.hpp>
#include <attn/softmax/min_max_blocks.hpp>
#include <attn/softmax/selected_keys.hpp>
#include <attn/softmax/selected_keys_step.hpp>
#include <attn/softmax/vertical_slash_blocks.hpp>

#include "reference/block_lists.hpp"
#include "support/allocations.hpp"
#include "support/call.hpp"
#include "support/catch.hpp"
#include "support/measure.hpp"
#include "support/refusal.hpp"
#include "support/run.hpp"

namespace testing::block_list_tests {
namespace {

using options = reference::block_list_options;

template <class S>
tensor<S> normal(std::uint64_t seed, idx_t batch, idx_t heads, idx_t length, idx_t dim) {
  return cast<S>(random_normal(seed, batch, heads, length, dim));
}

template <class Given>
void set(Given& to, const options& o) {
  if constexpr (requires { to.causal; }) to.causal = o.causal;
  if constexpr (requires { to.stride; })
    to.stride = o.stride, to.threshold = static_cast<typename Given::real>(o.threshold);
  if constexpr (requires { to.queries; }) to.queries = o.queries;
  to.lengths = o.lengths, to.query_lengths = o.query_lengths, to.key_lengths = o.key_lengths;
  if (!o.first_position.empty()) to.first_position = o.first_position;
  to.block = o.block, to.local_blocks = o.local_blocks, to.first_blocks = o.first_blocks;
}

struct antidiagonal {
  static constexpr bool always_causal = false;
  template <class S>
  static void run(const tensor<S>& q, const tensor<S>& k, tensor<idx_t>& lists, const options& o,
                  attn::execution& exec) {
    attn::antidiagonal_blocks_options<S> given;
    set(given, o);
    attn::antidiagonal_blocks(view(q), view(k), view(lists), given, exec);
  }
  static constexpr auto reference = &reference::antidiagonal_blocks;
};

struct min_max {
  static constexpr bool always_causal = false;
  template <class S>
  static void run(const tensor<S>& q, const tensor<S>& k, tensor<idx_t>& lists, const options& o,
                  attn::execution& exec) {
    attn::min_max_blocks_options<S> given;
    set(given, o);
    attn::min_max_blocks(view(q), view(k), view(lists), given, exec);
  }
  static tensor<idx_t> reference(const tensor<double>& q, const tensor<double>& k, options o, idx_t lists, idx_t n) {
    o.threshold = 1;
    return reference::min_max_blocks(q, k, o, lists, n);
  }
};

struct vertical_slash {
  static constexpr bool always_causal = true;
  template <class S>
  static void run(const tensor<S>& q, const tensor<S>& k, tensor<idx_t>& lists, const options& o,
                  attn::execution& exec) {
    attn::vertical_slash_blocks_options<S> given;
    set(given, o);
    attn::vertical_slash_blocks(view(q), view(k), view(lists), given, exec);
  }
  static tensor<idx_t> reference(const tensor<double>& q, const tensor<double>& k, options o, idx_t lists, idx_t n) {
    o.threshold = 1;
    return reference::vertical_slash_blocks(q, k, o, lists, n);
  }
};

template <class Chooser, class S>
tensor<idx_t> lists_of(const tensor<S>& q, const tensor<S>& k, const options& o, idx_t lists, idx_t n,
                       attn::execution& exec) {
  tensor<idx_t> indices(q.batch(), lists, q.length(), n, 99);
  Chooser::run(q, k, indices, o, exec);
  return indices;
}

template <class S, class Chooser>
void check_agreement() {
  std::uint64_t seed = 1;
  attn::execution serial, three(3, 0);
  for (idx_t keys : {0, 1, 7, 65, 130, 301})
    for (idx_t block : {4, 12, 400}) {
      const idx_t queries = seed % 3 == 0 ? keys : std::min<idx_t>(keys, 45),
                  key_heads = 1 + static_cast<idx_t>(seed % 2);
      const idx_t heads = 2 * key_heads, lists = seed % 4 < 2 ? heads : key_heads, dim = seed % 2 ? 5 : 16;
      const auto q = normal<S>(seed, 2, heads, queries, dim), k = normal<S>(seed + 1, 2, key_heads, keys, dim);
      options o;
      o.causal = Chooser::always_causal || seed % 5 != 0, o.block = block, o.stride = block == 12 ? 3 : 2;
      o.threshold = seed % 4 == 1 ? 0.6 : 1, o.first_blocks = static_cast<idx_t>(seed / 2 % 2), o.queries = 20;
      if (seed % 3 == 1) o.query_lengths = {queries, queries / 2}, o.key_lengths = {keys / 3, keys};
      if (seed % 5 == 2) o.first_position = {keys / 2 - 3, -2};
      CAPTURE(keys, block, seed, queries, heads, lists);
      const tensor<idx_t> wanted = Chooser::reference(cast<double>(q), cast<double>(k), o, lists, 7);
      CHECK(lists_of<Chooser>(q, k, o, lists, 7, serial) == wanted);
      CHECK(lists_of<Chooser>(q, k, o, lists, 7, three) == wanted);
      ++seed;
    }
}

// A chooser as a batch item, or a head, alone gives the same bits; padding, whatever it holds, changes nothing; nor do
// blocks to come.
template <class S, class Chooser>
void check_laws() {
  attn::execution serial;
  auto q = normal<S>(1, 2, 4, 90, 16), k = normal<S>(2, 2, 2, 90, 16);
  options o;
  o.causal = true, o.block = 8, o.threshold = 0.8, o.queries = 20, o.lengths = {90, 61};
  const tensor<idx_t> all = lists_of<Chooser>(q, k, o, 4, 5, serial);
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 4; ++h) {
      options of_item = o;
      const idx_t length = o.lengths[static_cast<std::size_t>(b)];
      of_item.lengths = {};
      tensor<S> one_q(1, 1, length, 16), one_k(1, 1, length, 16);
      for (idx_t i = 0; i < length; ++i)
        for (idx_t d = 0; d < 16; ++d) one_q(0, 0, i, d) = q(b, h, i, d), one_k(0, 0, i, d) = k(b, h / 2, i, d);
      const tensor<idx_t> alone = lists_of<Chooser>(one_q, one_k, of_item, 1, 5, serial);
      for (idx_t i = 0; i < 90; ++i)
        for (idx_t n = 0; n < 5; ++n)
          if (all(b, h, i, n) != (i < length ? alone(0, 0, i, n) : -1)) FAIL_CHECK("another list than alone");
    }
  const S nan = std::numeric_limits<S>::quiet_NaN();
  for (tensor<S>* x : {&q, &k})
    for (idx_t h = 0; h < x->heads(); ++h)
      for (idx_t i = 61; i < 90; ++i)
        for (idx_t d = 0; d < 16; ++d) (*x)(1, h, i, d) = nan;
  CHECK(lists_of<Chooser>(q, k, o, 4, 5, serial) == all);
  if (Chooser::always_causal) return;  // its lists depend on the last queries
  for (tensor<S>* x : {&q, &k})
    for (idx_t h = 0; h < x->heads(); ++h)
      for (idx_t i = 40; i < 90; ++i)
        for (idx_t d = 0; d < 16; ++d) (*x)(0, h, i, d) = nan;
  const tensor<idx_t> other = lists_of<Chooser>(q, k, o, 4, 5, serial);
  for (idx_t h = 0; h < 4; ++h)
    for (idx_t i = 0; i < 40; ++i)
      for (idx_t n = 0; n < 5; ++n)
        if (other(0, h, i, n) != all(0, h, i, n)) FAIL_CHECK("a block to come changed a list");
}

// Block 5 of the keys is like all queries.
template <class Chooser>
void check_structure() {
  attn::execution serial;
  const idx_t length = 256, block = 16, dim = 32;
  auto q = normal<float>(1, 1, 1, length, dim), k = normal<float>(2, 1, 1, length, dim);
  for (idx_t i = 0; i < length; ++i) q(0, 0, i, 0) += 6;
  for (idx_t j = 5 * block; j < 6 * block; ++j) k(0, 0, j, 0) += 4;
  options o;
  o.causal = true, o.block = block, o.stride = 4;
  const tensor<idx_t> lists = lists_of<Chooser>(q, k, o, 1, 3, serial);
  for (idx_t i = 6 * block; i < length; ++i) {
    bool found = false;
    for (idx_t n = 0; n < 3; ++n) found |= lists(0, 0, i, n) == 5;
    if (!found) FAIL_CHECK("query " << i << " does not name the block that it attends");
  }
}

// Law 11: once the scratch has grown to the largest shape.
template <class Chooser>
void check_allocation() {
  attn::execution serial;
  options o;
  o.causal = true, o.block = 8, o.stride = 4;
  for (bool grown : {false, true})
    for (idx_t length : {70, 1, 33}) {
      const auto q = normal<float>(1, 2, 4, length, 12), k = normal<float>(2, 2, 2, length, 12);
      tensor<idx_t> lists(2, 4, length, 3);
      const std::size_t before = allocations(), scratch = serial.scratch_bytes();
      Chooser::run(q, k, lists, o, serial);
      const std::size_t after = allocations();
      CHECK((!grown || (after == before && serial.scratch_bytes() == scratch)));
    }
}

}  // namespace

#define ATTN_TEST_CHOOSER(chooser)                                                                          \
  TEMPLATE_LIST_TEST_CASE(#chooser "_blocks: against the reference", "[block_lists]", all_types) {          \
    check_agreement<TestType, chooser>();                                                                   \
    check_laws<TestType, chooser>();                                                                        \
  }                                                                                                         \
  TEST_CASE(#chooser "_blocks: a structure that is there", "[block_lists]") { check_structure<chooser>(); } \
  TEST_CASE(#chooser "_blocks: no allocation once grown", "[block_lists]") { check_allocation<chooser>(); }

ATTN_TEST_CHOOSER(antidiagonal)
ATTN_TEST_CHOOSER(min_max)
ATTN_TEST_CHOOSER(vertical_slash)

TEMPLATE_LIST_TEST_CASE("min_max_cache: lists of steps are those of the whole", "[block_lists]", exact_types) {
  using S = TestType;
  attn::execution serial;
  const auto q = normal<S>(1, 2, 4, 90, 16), k = normal<S>(2, 2, 2, 90, 16);
  options o;
  o.causal = true, o.block = 8;
  const tensor<idx_t> whole = lists_of<min_max>(q, k, o, 2, 5, serial);
  attn::min_max_cache<S> cache({.batch = 2, .heads = 2, .dim = 16}, {.block = 8});
  tensor<idx_t> found(2, 2, 90, 5, 99);
  const auto feed = [&](idx_t begin, idx_t count) {
    cache.append(view(k).slice(2, begin, count), view(k).slice(2, begin, count));
    attn::min_max_blocks_cached(cache, view(q).slice(2, begin, count), view(found).slice(2, begin, count), {}, serial);
  };
  for (idx_t i = 0; i < 30; ++i) feed(i, 1);
  feed(30, 40);
  CHECK(cache.bytes() > 0);
  const auto copy = cache;  // what follows is undone
  cache.append(view(q).slice(1, 0, 2).slice(2, 0, 9), view(q).slice(1, 0, 2).slice(2, 0, 9));
  cache.truncate(67);
  feed(67, 3);
  cache = copy;
  feed(70, 20);
  CHECK(found == whole);

  // It is a cache like others.
  tensor<S> out(2, 4, 1, 16), wanted(2, 4, 90, 16);
  const attn::tensor_view<const idx_t> last = view(std::as_const(found)).slice(2, 89, 1);
  attn::selected_keys_cached(cache, view(q).slice(2, 89, 1), view(out), last, {.block = cache.block()});
  attn::selected_keys(view(q), view(k), view(k), view(wanted), view(std::as_const(found)),
                      {.causal = true, .block = 8});
  double worst = 0;
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 4; ++h)
      for (idx_t d = 0; d < 16; ++d)
        worst = std::max(worst, std::abs(static_cast<double>(out(b, h, 0, d) - wanted(b, h, 89, d))));
  CHECK(worst <= 1e-5);
}

TEST_CASE("makers of lists of blocks refuse what does not fit", "[block_lists]") {
  const tensor<float> q(2, 4, 5, 8, 1), k(2, 2, 9, 8, 1);
  tensor<std::int32_t> found(2, 4, 5, 3, 7);
  const attn::tensor_view<std::int32_t> to(found.data.data(), found.extents);
  const auto check = [&](const char* says, const char* name, auto&& call) {
    const std::string said = refusal(call);
    INFO(said << " should mention " << says);
    CHECK(well_formed(said, name));
    CHECK(said.find(says) != std::string::npos);
    for (std::int32_t x : found.data) CHECK(x == 7);
  };
  using antidiagonals = attn::antidiagonal_blocks_options<float>;
  const auto refused = [&](const char* says, in_view<float> keys, const attn::tensor_view<std::int32_t>& indices,
                           const antidiagonals& o = {}) {
    check(says, "antidiagonal_blocks", [&] { attn::antidiagonal_blocks(view(q), keys, indices, o); });
  };
  refused("key heads that divide the query heads 4; found 0", view(k).slice(1, 0, 0), to);
  refused("key batch = query batch 2; found 1", view(k).slice(0, 0, 1), to);
  refused("key dim = query dim 8; found 7", view(k).slice(3, 0, 7), to);
  refused("index batch = query batch 2; found 1", view(k), to.slice(0, 0, 1));
  refused("index rows = query length 5; found 4", view(k), to.slice(2, 0, 4));
  refused("index heads 2 or 4; found 3", view(k), to.slice(1, 0, 3));
  refused("entries of a list >= 1; found 0", view(k), to.slice(3, 0, 0));
  refused("null", view(k), attn::tensor_view<std::int32_t>(nullptr, {2, 4, 5, 3}));
  refused("block >= 1; found 0", view(k), to, {.block = 0});
  refused("local_blocks >= 0; found -1", view(k), to, {.local_blocks = -1});
  refused("first_blocks >= 0; found -1", view(k), to, {.first_blocks = -1});
  refused("at most the 3 entries of a list together; found 3 and 1", view(k), to, {.local_blocks = 3});
  refused("scale", view(k), to, {.scale = HUGE_VALF});
  refused("stride from 1 to 1024; found 0", view(k), to, {.stride = 0});
  refused("stride from 1 to 1024; found 2048", view(k), to, {.block = 4096, .stride = 2048});
  refused("a stride that divides block = 128; found 24", view(k), to, {.stride = 24});
  refused("threshold above 0, up to 1; found 0", view(k), to, {.threshold = 0});
  refused("threshold above 0, up to 1; found 1.5", view(k), to, {.threshold = 1.5F});
  refused("threshold above 0", view(k), to, {.threshold = std::nanf("")});
  const std::vector<idx_t> places = {0, 1, 2}, lengths = {5, 10};
  refused("first_position, one per batch item: 2; found 3", view(k), to, {.first_position = places});
  refused("key_lengths from 0 to 9; found 10", view(k), to, {.key_lengths = lengths});
  refused("query_lengths and key_lengths where query length 5 and key length 9 differ", view(k), to,
          {.lengths = lengths});

  check("block >= 1; found 0", "min_max_blocks", [&] { attn::min_max_blocks(view(q), view(k), to, {.block = 0}); });
  check("local_blocks >= 1; found 0", "min_max_blocks",
        [&] { attn::min_max_blocks(view(q), view(k), to, {.causal = true, .local_blocks = 0}); });
  check("block >= 1; found 0", "vertical_slash_blocks",
        [&] { attn::vertical_slash_blocks(view(q), view(k), to, {.block = 0}); });
  check("queries >= 1; found 0", "vertical_slash_blocks",
        [&] { attn::vertical_slash_blocks(view(q), view(k), to, {.queries = 0}); });

  check("block >= 1; found 0", "min_max_cache",
        [&] { attn::min_max_cache<float>({.batch = 2, .heads = 2, .dim = 8}, {.block = 0}); });
  attn::min_max_cache<float> cache({.batch = 2, .heads = 2, .dim = 8});
  cache.append(view(k), view(k));
  check("local_blocks >= 1; found 0", "min_max_blocks_cached",
        [&] { attn::min_max_blocks_cached(cache, view(q), to, {.local_blocks = 0}); });
  check("key dim = query dim 7; found 8", "min_max_blocks_cached",
        [&] { attn::min_max_blocks_cached(cache, view(q).slice(3, 0, 7), to); });
  const std::vector<idx_t> beyond = {6, 5};
  check("lengths from 0 to 5; found 6", "min_max_blocks_cached",
        [&] { attn::min_max_blocks_cached(cache, view(q), to, {.lengths = beyond}); });
}

}  // namespace testing::block_list_tests
