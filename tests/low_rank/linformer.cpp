// linformer against its reference: shared and separate projections, lengths, odd shapes, all types.
#include <array>

#include "support/call_low_rank.hpp"
#include "support/catch.hpp"

namespace testing::linformer_tests {
namespace {

struct projections {
  idx_t rank = 20;
  bool e_per_head = false, f_per_head = false, one = false;
};

linformer_problem problem_of(const problem_shape& s, const projections& by, std::uint64_t seed = 1) {
  linformer_problem p = random_problem<linformer_problem>(s, seed);
  const double deviation = 1 / std::sqrt(static_cast<double>(by.rank));
  p.options.e = random_normal(50 + seed, 1, by.e_per_head ? s.heads : 1, by.rank, s.keys, deviation);
  p.options.f =
      by.one ? p.options.e : random_normal(60 + seed, 1, by.f_per_head ? s.heads : 1, by.rank, s.keys, deviation);
  return p;
}

template <class S>
void check(const linformer_problem& p) {
  const errors e = errors_of<S>(p);
  CHECK(e.out <= made_keys_tolerance<S>::out);
  CHECK(e.lse <= made_keys_tolerance<S>::lse);
}

enum class lengths { none, both, queries_and_keys, keys_only };

}  // namespace

TEMPLATE_LIST_TEST_CASE("linformer: every kind of projection with every kind of lengths", "[linformer]", all_types) {
  for (const projections& by : {projections{20},
                                {20, true, true},
                                {33, false, true},
                                {7, true, false},
                                {20, false, false, true},
                                {100, true, true, true},
                                {1}})
    for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys, lengths::keys_only})
      for (idx_t kv_heads : {1, 2, 4}) {
        problem_shape shape{.kv_heads = kv_heads, .queries = 50, .keys = 77, .dim = 9, .value_dim = 12};
        if (given == lengths::both) shape.queries = shape.keys;
        linformer_problem p = problem_of(shape, by);
        auto& o = p.options;
        if (given == lengths::both) o.lengths = {33, 77};
        if (given == lengths::queries_and_keys) o.query_lengths = {50, 11}, o.key_lengths = {0, 64};
        if (given == lengths::keys_only) o.key_lengths = {77, 5};
        if (by.rank == 7) o.scale = 0.3;
        CAPTURE(by.rank, by.e_per_head, by.f_per_head, by.one, int(given), kv_heads);
        check<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("linformer: odd lengths, dims and ranks", "[linformer]", exact_types) {
  const idx_t sizes[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  for (std::size_t n = 0; n < std::size(sizes); ++n)
    for (idx_t rank : {1, 5, 12, 32, 65, 130}) {
      problem_shape shape{.queries = sizes[(3 * n + 1) % 11], .keys = sizes[n]};
      shape.dim = dims[(n + static_cast<std::size_t>(rank)) % 8], shape.value_dim = dims[(3 * n) % 8];
      CAPTURE(shape.queries, shape.keys, shape.dim, shape.value_dim, rank);
      check<TestType>(problem_of(shape, {rank, n % 2 == 0, n % 3 == 0}, n + 1));
    }
}

TEMPLATE_LIST_TEST_CASE("linformer: empty batches and heads", "[linformer]", exact_types) {
  for (auto [batch, heads, kv_heads] : {std::array<idx_t, 3>{0, 4, 2}, {2, 0, 0}, {0, 0, 0}, {1, 1, 1}}) {
    CAPTURE(batch, heads, kv_heads);
    check<TestType>(problem_of({.batch = batch, .heads = heads, .kv_heads = kv_heads}, {10, true, false}));
  }
}

TEMPLATE_LIST_TEST_CASE("linformer: many heads and items go through in waves", "[linformer]", exact_types) {
  problem_shape shape{.batch = 5, .heads = 12, .kv_heads = 3, .queries = 20, .keys = 300, .dim = 8, .value_dim = 8};
  linformer_problem p = problem_of(shape, {16, true, false});
  p.options.key_lengths = {300, 17, 299, 0, 256};
  check<TestType>(p);
}

TEMPLATE_LIST_TEST_CASE("linformer: the promised accuracy at length 4096", "[linformer][long]", exact_types) {
  problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 2, .queries = 300, .keys = 4096, .dim = 64, .value_dim = 64};
  check<TestType>(problem_of(shape, {256}));
}

TEMPLATE_LIST_TEST_CASE("linformer: projections of any layout", "[linformer]", exact_types) {
  using T = TestType;
  const linformer_problem p = rounded<T>(problem_of({}, {24, true, true}));
  const tensor<T> q = cast<T>(p.q), k = cast<T>(p.k), v = cast<T>(p.v), e = cast<T>(p.options.e),
                  f = cast<T>(p.options.f);
  attn::execution serial;
  tensor<T> plain(2, 4, 65, 16), other(2, 4, 65, 16);
  compiled_linformer<T>::call(view(q), view(k), view(v), view(plain), heads_view(e), heads_view(f), {}, serial);
  // e backwards and column-major, f with gaps
  std::vector<T> turned(e.data.size()), sparse(3 * f.data.size());
  const projection_view<T> te(turned.data() + turned.size() - 1, {4, 24, 65}, {-24 * 65, -1, -24});
  const projection_view<T> sf(sparse.data(), {4, 24, 65}, {3 * 24 * 65, 3 * 65, 3});
  for (idx_t h = 0; h < 4; ++h)
    for (idx_t r = 0; r < 24; ++r)
      for (idx_t j = 0; j < 65; ++j) {
        turned[turned.size() - 1 - static_cast<std::size_t>(h * 24 * 65 + r + j * 24)] = e(0, h, r, j);
        sparse[static_cast<std::size_t>(3 * ((h * 24 + r) * 65 + j))] = f(0, h, r, j);
      }
  compiled_linformer<T>::call(view(q), view(k), view(v), view(other), te, sf, {}, serial);
  CHECK(other == plain);
}

TEMPLATE_LIST_TEST_CASE("linformer: keys that are hidden", "[linformer][key_mask]", all_types) {
  attn::execution serial, seven(7, 0);
  for (const projections& by : {projections{20}, {33, true, true}, {100, false, true}, {9, false, false, true}})
    for (lengths given : {lengths::none, lengths::both, lengths::queries_and_keys})
      for (idx_t keys : {77, 600})
        for (idx_t hidden : {-1, 1}) {
          problem_shape shape{.queries = 50, .keys = keys, .dim = 9, .value_dim = 12};
          if (given == lengths::both) shape.queries = shape.keys;
          linformer_problem p = problem_of(shape, by);
          auto& o = p.options;
          if (given == lengths::both) o.lengths = {33, keys};
          if (given == lengths::queries_and_keys) o.query_lengths = {50, 11}, o.key_lengths = {keys - 1, 64};
          o.key_mask = gapped_key_mask(given == lengths::none && hidden < 0 ? 1 : 2, keys, hidden);
          CAPTURE(by.rank, by.e_per_head, by.f_per_head, by.one, int(given), keys, hidden);
          check<TestType>(p);
          const reference::result alone = run<TestType>(p, serial), others = run<TestType>(poisoned(p), seven);
          CHECK(alone.out == others.out);
          CHECK(alone.lse == others.lse);
        }
}

TEST_CASE("linformer: on Eigen matrices, as a caller writes it", "[linformer]") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(30, 8), k = Eigen::MatrixXf::Random(40, 8);
  const Eigen::MatrixXf v = Eigen::MatrixXf::Random(40, 5);
  Eigen::MatrixXf out(30, 5), wanted(30, 5);
  const auto e = attn::draw_projection<float>(10, 40, {.seed = 7}),
             f = attn::draw_projection<float>(10, 40, {.seed = 8});
  attn::linformer(q, k, v, out, e, f);
  using matrix = Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>;
  const Eigen::MatrixXf few_keys = matrix(e.view().data(), 10, 40) * k,
                        few_values = matrix(f.view().data(), 10, 40) * v;
  attn::full_softmax(q, few_keys, few_values, wanted);
  CHECK((out - wanted).norm() <= 2e-6f * wanted.norm());
}

TEST_CASE("linformer: projections of long sequences", "[linformer]") {
  constexpr idx_t length = 262144;
  const tensor<float> q(1, 1, 2, 1, 0.7f), k(1, 1, length, 1, 0.7f), e(1, 1, 4, length, 0.7f);
  tensor<float> out(1, 1, 2, 1);
  attn::execution serial;
  compiled_linformer<float>::call(view(q), view(k), view(k), view(out), heads_view(e), heads_view(e), {}, serial);
  const double right = static_cast<double>(0.7f) * static_cast<double>(0.7f) * static_cast<double>(length);
  CHECK(std::abs(static_cast<double>(out(0, 0, 1, 0)) / right - 1) <= 4e-6);  // that of a sum of 256 equal terms
}

TEST_CASE("linformer: scratch grows with the length only up to the tokens that are packed at a time", "[linformer]") {
  const auto scratch = [](idx_t length) {
    attn::execution execution;
    run<float>(problem_of({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 8, .keys = length, .dim = 8}, {64}),
               execution);
    return execution.scratch_bytes();
  };
  CHECK(scratch(40000) == scratch(16384));
}

}  // namespace testing::linformer_tests
