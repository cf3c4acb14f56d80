// Caches of int8 that store keys rotated: to the last bit what a cache gives whose keys and queries the caller has
// rotated, for all that reads one; and what that is good for.
#include <attn/core/detail/hadamard.hpp>
#include <attn/core/paged_cache.hpp>
#include <attn/softmax/full_softmax_step.hpp>
#include <attn/softmax/lightning_indexer_step.hpp>
#include <attn/softmax/pointwise_step.hpp>
#include <attn/softmax/selected_keys_step.hpp>
#include <attn/softmax/sliding_window_step.hpp>

#include <bit>
#include <cmath>

#include "support/cache_items.hpp"
#include "support/catch.hpp"
#include "support/npy.hpp"
#include "support/refusal.hpp"
#include "support/run.hpp"

namespace testing::rotated_caches_tests {
namespace {

using int8 = std::int8_t;

// Every row rotated, or rotated back.
tensor<float> turned(tensor<float> x, bool back = false) {
  std::vector<float> row(static_cast<std::size_t>(x.dim()) + 16);  // whole vectors
  for (std::size_t at = 0; at < x.data.size(); at += static_cast<std::size_t>(x.dim())) {
    const auto begin = x.data.begin() + static_cast<std::ptrdiff_t>(at);
    std::fill(std::copy_n(begin, x.dim(), row.begin()), row.end(), 0.0f);
    back ? attn::detail::rotate_row_back(row.data(), x.dim()) : attn::detail::rotate_row(row.data(), x.dim());
    std::copy_n(row.begin(), x.dim(), begin);
  }
  return x;
}

struct inputs {
  tensor<float> q, k, v;
  inputs(std::uint64_t seed, const cache_shape& s, idx_t batch, idx_t count)
      : q(cast<float>(random_normal(seed, batch, s.heads, count, s.dim))),
        k(cast<float>(random_normal(seed + 1, batch, s.kv_heads, count, s.dim))),
        v(cast<float>(random_normal(seed + 2, batch, s.kv_heads, count, s.value_dim))) {}
};

attn::state_extents extents_of(const cache_shape& s, idx_t batch) {
  return {.batch = batch, .heads = s.kv_heads, .dim = s.dim, .value_dim = s.value_dim};
}

// attend(cache, q, k, v, out) of a few chunks: over a rotated cache as over another one with rotated queries and keys.
template <class Attend>
void check_chunks(auto rotated, auto plain, const cache_shape& s, const Attend& attend, double tolerance = 0) {
  const idx_t batch = rotated.batch();
  std::uint64_t seed = 1;
  for (const idx_t count : {37, 1, 3, 70, 1}) {
    const inputs x(seed += 10, s, batch, count);
    tensor<float> found(batch, s.heads, count, s.value_dim, 7), wanted = found;
    attend(rotated, x.q, x.k, x.v, found, false);
    attend(plain, turned(x.q), turned(x.k), x.v, wanted, true);
    CAPTURE(s.dim, count);
    if (tolerance == 0)
      CHECK(found == wanted);
    else
      CHECK(relative_error(found, wanted) <= tolerance);
  }
}

const auto step = [](auto& cache, const auto& q, const auto& k, const auto& v, auto& out, bool) {
  attn::full_softmax_step(cache, view(q), view(k), view(v), view(out));
};

}  // namespace

TEST_CASE("A rotation is the Hadamard matrix times signs, and keeps products", "[rotated_caches]") {
  for (const idx_t dim : {2, 4, 6, 12, 16, 20, 48, 80, 96, 128, 192, 512, 2048}) {
    const idx_t block = dim & -dim;
    const tensor<float> x = cast<float>(random_normal(1, 1, 1, 2, dim)), y = turned(x);
    tensor<double> wanted(1, 1, 2, dim);
    double product = 0, kept = 0;
    for (idx_t d = 0; d < dim; ++d) {
      for (idx_t e = d / block * block; e < d / block * block + block; ++e) {
        const int sign = std::popcount(static_cast<unsigned>(d % block & e % block)) % 2 ? -1 : 1;
        const float factor = attn::detail::rotation_signs[static_cast<std::size_t>(e % 256)];
        for (idx_t t : {0, 1})
          wanted(0, 0, t, d) += double(sign * factor) * double(x(0, 0, t, e)) / std::sqrt(double(block));
      }
      product += double(x(0, 0, 0, d)) * double(x(0, 0, 1, d)), kept += double(y(0, 0, 0, d)) * double(y(0, 0, 1, d));
    }
    CAPTURE(dim);
    CHECK(relative_error(y, wanted) <= 1e-6);
    CHECK(relative_error(turned(y, true), cast<double>(x)) <= 1e-6);
    CHECK(std::abs(product - kept) <= 1e-6 * double(dim));
  }
  const auto& signs = attn::detail::rotation_signs;
  const auto negative = std::count(signs.begin(), signs.end(), -1.0f);
  CHECK((negative > 100 && negative < 156));
}

TEST_CASE("Steps over rotated keys are those of rotated queries", "[rotated_caches]") {
  for (const cache_shape& s : {cache_shape{.dim = 12}, {.dim = 48}, {.heads = 6, .kv_heads = 1, .dim = 80},
                               {.heads = 3, .kv_heads = 3, .dim = 96}, {.dim = 128, .value_dim = 128}}) {
    const attn::state_extents extents = extents_of(s, 2);
    check_chunks(attn::kv_cache<int8>(extents, {.rotate = true}), attn::kv_cache<int8>(extents), s, step);
    const attn::page_pool_extents pages{.pages = 60, .page_tokens = 16, .heads = s.kv_heads, .dim = s.dim,
                                        .value_dim = s.value_dim};
    attn::page_pool<int8> pool(pages, {.rotate = true}), other(pages);
    attn::paged_cache<int8> shared(pool, 4), shared_too(other, 4);
    const inputs first(5, s, 4, 100);
    const std::vector<idx_t> lengths = {100, 0, 0, 0};
    const tensor<float> k = turned(first.k);
    shared.append(view(first.k), view(first.v), {.lengths = lengths}), shared.copy_item(0, 2), shared.copy_item(0, 3);
    shared_too.append(view(k), view(first.v), {.lengths = lengths});
    shared_too.copy_item(0, 2), shared_too.copy_item(0, 3);
    check_chunks(shared, shared_too, s, step);
  }
}

TEST_CASE("All that reads a cache rotates its queries", "[rotated_caches]") {
  const cache_shape s;
  const attn::state_extents extents = extents_of(s, 2);
  const auto check = [&](const auto& attend) {
    check_chunks(attn::kv_cache<int8>(extents, {.rotate = true}), attn::kv_cache<int8>(extents), s, attend);
  };
  check([](auto& cache, const auto& q, const auto& k, const auto& v, auto& out, bool) {
    cache.append(view(k), view(v));
    attn::full_softmax_cached(cache, view(q), view(out), {.causal = false});
  });
  const std::vector<idx_t> dilation = {2}, globals = {0, 9};
  const attn::sliding_window_cache_options window{.left = 20, .dilation = dilation, .global_positions = globals};
  check([&](auto& cache, const auto& q, const auto& k, const auto& v, auto& out, bool) {
    attn::sliding_window_step(cache, window, view(q), view(k), view(v), view(out));
  });
  auto of_ring = window;
  of_ring.rotate = true;
  attn::execution two(2);
  check_chunks(attn::sliding_window_cache<int8>(extents, of_ring), attn::sliding_window_cache<int8>(extents, window), s,
               [&](auto& cache, const auto& q, const auto& k, const auto& v, auto& out, bool by_hand) {
                 if (by_hand)
                   attn::sliding_window_step(cache, view(q), view(k), view(v), view(out));
                 else
                   attn::sliding_window_step(cache, view(q), view(k), view(v), view(out), two);
               });
  check([](auto& cache, const auto& q, const auto& k, const auto& v, auto& out, bool) {
    attn::pointwise_step(cache, view(q), view(k), view(v), view(out), {.left = q.length() > 40 ? 15 : attn::unlimited});
  });
  check([](auto& cache, const auto& q, const auto& k, const auto& v, auto& out, bool) {
    std::vector<std::int32_t> list(static_cast<std::size_t>(2 * 2 * q.length() * 6));
    for (std::size_t n = 0; n < list.size(); ++n) list[n] = static_cast<std::int32_t>(n % 6 * (1 + n % 2));
    const attn::tensor_view<const std::int32_t> indices(list.data(), {2, 2, q.length(), 6});
    attn::selected_keys_step(cache, view(q), view(k), view(v), view(out), indices);
  });
  const attn::state_extents keys{.batch = 2, .heads = 1, .dim = s.dim, .value_dim = 0};
  check_chunks(attn::kv_cache<int8>(keys, {.rotate = true}), attn::kv_cache<int8>(keys), {.kv_heads = 1},
               [&](auto& cache, const auto& q, const auto& k, const auto&, auto& out, bool) {
                 std::vector<std::int32_t> list(static_cast<std::size_t>(2 * q.length() * 8), -1);
                 const attn::tensor_view<std::int32_t> indices(list.data(), {2, 1, q.length(), 8});
                 attn::lightning_indexer_step(cache, view(q), view(k), indices, {.topk = 8});
                 std::fill(out.data.begin(), out.data.end(), 0.0f);
                 std::copy(list.begin(), list.end(), out.data.begin());
               });
}

// Their products are those of queries and keys as they were given. Weights are 16-bit whole numbers: with other sums
// one may differ by 1/32767 of the largest.
TEST_CASE("Relative keys and position queries over rotated keys", "[rotated_caches]") {
  const cache_shape s;
  const attn::state_extents extents = extents_of(s, 2);
  const tensor<float> table = cast<float>(random_normal(3, 1, s.heads, 41, s.dim)), turned_table = turned(table);
  const auto rows = [&](const tensor<float>& x) {
    return attn::tensor_view<const float, 3>(x.data.data(), {s.heads, 41, s.dim});
  };
  check_chunks(attn::kv_cache<int8>(extents, {.rotate = true}), attn::kv_cache<int8>(extents), s,
               [&](auto& cache, const auto& q, const auto& k, const auto& v, auto& out, bool by_hand) {
                 const tensor<float> given = by_hand ? turned(q, true) : q;
                 attn::full_softmax_step(cache, view(q), view(k), view(v), view(out),
                                         {.relative_keys = rows(table), .relative_queries = view(given)});
               },
               1.0 / 32767);
  for (const bool by_position : {false, true})
    check_chunks(attn::kv_cache<int8>(extents, {.rotate = true}), attn::kv_cache<int8>(extents), s,
                 [&](auto& cache, const auto& q, const auto& k, const auto& v, auto& out, bool by_hand) {
                   attn::softmax_step_options<float> o{};
                   (by_position ? o.position_queries : o.relative_keys) = rows(by_hand ? turned_table : table);
                   attn::full_softmax_step(cache, view(q), view(k), view(v), view(out), o);
                 },
                 1.0 / 32767);
}

TEST_CASE("Items, tokens forgotten and kept, copies, and memory of the caller's", "[rotated_caches]") {
  const cache_shape s;
  const auto by_lengths = [](auto& cache, auto q, auto k, auto v, auto out, attn::list_view<idx_t> lengths) {
    attn::full_softmax_step(cache, q, k, v, out, {.lengths = lengths});
  };
  attn::kv_cache<int8> items(extents_of(s, 4), {.rotate = true});
  check_items<float>(items, attn::kv_cache<int8>(extents_of(s, 1), {.rotate = true}), by_lengths, s, 1e-3);
  const auto both = [&](attn::kv_cache<int8> cache, attn::kv_cache<int8> plain) {
    const inputs x(1, s, 2, 90);
    const tensor<float> k = turned(x.k);
    cache.append(view(x.k), view(x.v)), plain.append(view(k), view(x.v));
    for (auto* one : {&cache, &plain}) {
      one->truncate(80), one->keep(0, std::vector<idx_t>{1, 2, 5, 20, 33, 79}), one->copy_item(0, 1);
      *one = attn::kv_cache<int8>(*one);
    }
    check_chunks(cache, plain, s, step);
  };
  both(attn::kv_cache<int8>(extents_of(s, 2), {.rotate = true}), attn::kv_cache<int8>(extents_of(s, 2)));
  std::vector<int8> memory(2 * 2 * 20 * (64 + 18 * 20 + 64 + 16 * 12));
  const attn::tensor_view<int8> keys(memory.data(), {2, 2, 20, 64 + 18 * 20}),
      values(memory.data() + keys.size(), {2, 2, 20, 64 + 16 * 12});
  both(attn::kv_cache<int8>(keys, values, {}, {.rotate = true}), attn::kv_cache<int8>(extents_of(s, 2)));
  // A cache that becomes another one becomes rotated as that is.
  attn::kv_cache<int8> one(extents_of(s, 2), {.rotate = true}), other(extents_of(s, 2));
  other.reserve(200), other = one;
  check_chunks(other, attn::kv_cache<int8>(extents_of(s, 2)), s, step);
}

TEST_CASE("Rotated tokens of 16 bits, and of any strides", "[rotated_caches]") {
  const cache_shape s{.heads = 2, .dim = 48};
  const attn::state_extents extents = extents_of(s, 1);
  const auto check = [&]<class S>(S) {
    const inputs x(1, s, 1, 40);
    const tensor<S> q = cast<S>(x.q), k = cast<S>(x.k), v = cast<S>(x.v);
    tensor<S> apart(1, s.kv_heads, s.dim, 40), out(1, s.heads, 40, s.value_dim), again = out;
    for (idx_t h = 0; h < s.kv_heads; ++h)
      for (idx_t t = 0; t < 40; ++t)
        for (idx_t d = 0; d < s.dim; ++d) apart(0, h, d, t) = k(0, h, t, d);
    const attn::tensor_view<const S> by_channel(apart.data.data(), {1, s.kv_heads, 40, s.dim},
                                                {s.kv_heads * s.dim * 40, s.dim * 40, 1, 40});
    attn::kv_cache<int8> dense(extents, {.rotate = true}), strided(extents, {.rotate = true});
    attn::full_softmax_step(dense, view(q), view(k), view(v), view(out));
    attn::full_softmax_step(strided, view(q), by_channel, view(v), view(again));
    CHECK(out.data == again.data);
    full_softmax_problem p{cast<double>(q), cast<double>(k), cast<double>(v), {}};
    p.options.causal = true;
    CHECK(relative_error(out, expected(p).out) <= 0.02);
  };
  check(float{}), check(Eigen::half{}), check(Eigen::bfloat16{});
}

namespace {

// Causal attention over a cache that is fed with all tokens, against exact attention.
double error_of(const full_softmax_problem& p, bool rotate) {
  const tensor<float> q = cast<float>(p.q), k = cast<float>(p.k), v = cast<float>(p.v);
  tensor<float> out(q.batch(), q.heads(), q.length(), v.dim());
  attn::kv_cache<int8> cache({.batch = k.batch(), .heads = k.heads(), .dim = k.dim(), .value_dim = v.dim()},
                             {.rotate = rotate});
  attn::full_softmax_step(cache, view(q), view(k), view(v), view(out));
  return relative_error(out, expected(p).out);
}

}  // namespace

TEST_CASE("Channels of the keys that are far larger than others", "[rotated_caches]") {
  full_softmax_problem p{random_normal(1, 1, 1, 300, 128), random_normal(2, 1, 1, 300, 128),
                         random_normal(3, 1, 1, 300, 128), {}};
  p.options.causal = true;
  for (idx_t t = 0; t < 300; ++t)
    for (idx_t d : {3, 67}) p.k(0, 0, t, d) *= 50, p.q(0, 0, t, d) /= 50;
  p = rounded<float>(p);
  const double rotated = error_of(p, true), plain = error_of(p, false);
  CAPTURE(rotated, plain);
  CHECK(rotated <= 0.02);
  CHECK(plain >= 5 * rotated);
}

TEST_CASE("Rotated keys of a trained model", "[rotated_caches]") {
  for (const char* layer : {"use_lite_layer0", "use_lite_layer1"}) {
    const auto read = [&](const char* name) {
      const npy_array x = read_npy(std::filesystem::path(ATTN_DATA_DIR) / layer / name);
      tensor<double> all(x.shape[0], x.shape[1], x.shape[2], x.shape[3]);
      all.data = x.values;
      return all;
    };
    full_softmax_problem p{read("q.npy"), read("k.npy"), read("v.npy"), {}};
    p.options.causal = true;
    const double error = error_of(p, true);
    CAPTURE(layer, error);
    CHECK(error <= 0.006);
  }
}

TEST_CASE("Rotations that caches refuse", "[rotated_caches]") {
  const auto says = [](const char* name, const char* part, auto&& call) {
    const std::string message = refusal(call);
    INFO(message);
    CHECK(well_formed(message, name));
    CHECK(message.find(part) != std::string::npos);
  };
  const attn::kv_cache_options rotate{.rotate = true};
  says("kv_cache", "one scale", [&] { attn::kv_cache<float>({.dim = 8}, rotate); });
  says("kv_cache", "one scale", [&] { attn::kv_cache<attn::int4>({.dim = 8}, rotate); });
  says("kv_cache", "one scale", [&] { attn::kv_cache<attn::int8_channels>({.dim = 8}, rotate); });
  says("kv_cache", "one scale", [&] { attn::kv_cache<attn::float8_e4m3>({.dim = 8}, rotate); });
  says("kv_cache", "an even dim", [&] { attn::kv_cache<int8>({.dim = 1}, rotate); });
  says("kv_cache", "an even dim", [&] { attn::kv_cache<int8>({.dim = 0}, rotate); });
  says("kv_cache", "an even dim up to 2048", [&] { attn::kv_cache<int8>({.dim = 2050}, rotate); });
  says("kv_cache", "values of their own",
       [&] { attn::kv_cache<int8>({.dim = 8}, {.values_in_keys = true, .rotate = true}); });
  says("page_pool", "one scale", [&] { attn::page_pool<Eigen::half>({.pages = 2, .dim = 8}, rotate); });
  says("sliding_window_cache", "one scale", [&] { attn::sliding_window_cache<float>({.dim = 8}, {.rotate = true}); });
  std::vector<int8> memory(2 * (64 + 18 * 8));
  const attn::tensor_view<int8> keys(memory.data(), {1, 1, 2, 64 + 18 * 8});
  says("kv_cache", "values of their own", [&] { attn::kv_cache<int8>(keys, keys, {}, rotate); });
  says("page_pool", "values of their own", [&] { attn::page_pool<int8>(keys, keys, rotate); });
  tensor<float> x(1, 1, 1, 8, 1), out = x;
  attn::kv_cache<int8> cache({.dim = 8}, rotate);
  says("sliding_window_step", "no rotate", [&] {
    attn::sliding_window_step(cache, {.rotate = true}, view(std::as_const(x)), view(std::as_const(x)),
                              view(std::as_const(x)), view(out));
  });
  x(0, 0, 0, 3) = 2e34f;
  says("kv_cache", "up to 1e+34", [&] { cache.append(view(std::as_const(x)), view(std::as_const(x))); });
  CHECK(cache.tokens() == 0);
}

}  // namespace testing::rotated_caches_tests
