// attn::mpi::linear against linear on the whole sequence: options, splits, element types, threads, what is refused.
#include <attn/core/threads.hpp>
#include <attn/mpi/linear.hpp>

#include "mpi/spread.hpp"

namespace testing::linear_tests {
namespace {

constexpr idx_t segment = 1024;

struct problem {
  idx_t tokens = 4 * segment + 300, queries = tokens;
  tensor<double> q = random_normal(1, 2, 4, queries, 9), k = random_normal(2, 2, 2, tokens, 9),
                 v = random_normal(3, 2, 2, tokens, 5);
};

// Both compute what lies within tolerance<float>::out of the exact result, or at most rounding to S.
template <class S>
constexpr double bound = std::is_same_v<S, double> ? 1e-13 : std::is_same_v<S, float> ? 4e-6 : 0x1p-7;

template <class S, class Map = attn::feature_maps::elu_plus_one>
void check(const problem& p, attn::linear_options<S> options, idx_t decay_heads = 0, const Map& map = {},
           attn::execution exec = attn::execution()) {
  const auto decay = gates_near_one<attn::compute_type<S>>(decay_heads, p.tokens);
  check_spread<S>(
      p.q, p.k, p.v, segment, bound<S>,
      [&](const auto& q, const auto& k, const auto& v, const auto& out) {
        if (decay_heads > 0) options.decay = row_view(decay);
        attn::linear(q, k, v, out, options, map);
      },
      [&](const auto& q, const auto& k, const auto& v, const auto& out, const own_range& range) {
        const auto own = rows(decay, range.begin, range.length);
        if (decay_heads > 0) options.decay = row_view(own);
        attn::mpi::linear(q, k, v, out, MPI_COMM_WORLD, options, map, exec);
      });
}

TEST_CASE("mpi linear: options", "[linear]") {
  const problem p;
  for (bool causal : {false, true})
    for (bool normalise : {true, false})
      for (bool padded : {false, true}) {
        const std::vector<idx_t> lengths = {p.tokens - 700, normalise ? 0 : 1500};
        CAPTURE(causal, normalise, padded);
        attn::linear_options<float> options{.causal = causal, .eps = 0.25f, .normalise = normalise};
        if (padded) options.lengths = lengths;
        check<float>(p, options);
        if (!causal) continue;
        check<float>(p, options, 2);
        check<float>(p, options, 4);
      }
}

TEST_CASE("mpi linear: feature maps", "[linear]") {
  const problem p;
  for (bool causal : {false, true}) {
    check<float>(p, {.causal = causal}, 0, attn::feature_maps::relu{});
    check<float>(p, {.causal = causal}, 0, [](float x) { return x * x; });
  }
}

TEST_CASE("mpi linear: element types", "[linear]") {
  const problem p;
  for (bool causal : {false, true}) {
    check<double>(p, {.causal = causal});
    check<Eigen::bfloat16>(p, {.causal = causal});
  }
}

TEST_CASE("mpi linear: threads within the processes", "[linear]") {
  const problem p;
  problem one_head;
  one_head.q = rows(head(p.q, 0, 0), 0, p.tokens), one_head.k = head(p.k, 0, 0), one_head.v = head(p.v, 0, 0);
  for (bool causal : {false, true})
    for (int threads : {2, 3}) {
      check<float>(p, {.causal = causal}, 0, {}, attn::execution(threads, 0));
      check<float>(one_head, {.causal = causal}, 0, {}, attn::execution(threads, 0));
    }
}

TEST_CASE("mpi linear: fewer queries than keys, and more", "[linear]") {
  for (idx_t more : {-3000, -1, 70}) {
    problem p;
    p.q = random_normal(1, 2, 4, p.tokens + more, 9);
    for (bool causal : {false, true}) {
      CAPTURE(more, causal);
      if (more <= 0) check<float>(p, {.causal = causal});
      // Queries before the first key are on process 0.
      const bool last = own_rank() == process_count() - 1;
      const idx_t begin = own_rank() * 2 * segment, end = begin + 2 * segment;
      const auto within = [](idx_t n, idx_t most) { return std::clamp<idx_t>(n, 0, most); };
      const tensor<float> q = cast<float>(p.q), k = cast<float>(p.k), v = cast<float>(p.v);
      const idx_t first = begin == 0 ? 0 : within(begin + more, q.length()),
                  count = (last ? q.length() : within(end + more, q.length())) - first,
                  key = within(begin, p.tokens), keys = (last ? p.tokens : within(end, p.tokens)) - key;
      tensor<float> wanted(2, 4, q.length(), 5), out(2, 4, count, 5, rubbish);
      attn::linear(view(q), view(k), view(v), view(wanted), {.causal = causal});
      const auto own_q = rows(q, first, count), own_k = rows(k, key, keys), own_v = rows(v, key, keys);
      attn::mpi::linear(view(own_q), view(own_k), view(own_v), view(out), MPI_COMM_WORLD,
                        {.causal = causal});
      CHECK(out == rows(wanted, first, count));
    }
  }
}

TEST_CASE("mpi linear: no bit depends on padding", "[linear]") {
  problem p;
  const std::vector<idx_t> lengths = {1700, 3100};
  for (tensor<double>* x : {&p.q, &p.k, &p.v}) poison_padding(*x, lengths);
  for (bool causal : {false, true}) check<float>(p, {.causal = causal, .lengths = lengths});
}

TEST_CASE("mpi linear: sequences and batches without elements", "[linear]") {
  for (bool causal : {false, true}) {
    const idx_t own = own_rank() == process_count() - 1 ? 3 : 0;
    const tensor<float> q(1, 2, own, 4, 1), none(1, 2, 0, 4);
    tensor<float> out(1, 2, own, 4, rubbish);
    attn::mpi::linear(view(q), view(none), view(none), view(out), MPI_COMM_WORLD, {.causal = causal});
    CHECK(out == tensor<float>(1, 2, own, 4));
    const tensor<float> no_batch(0, 2, 5, 4), no_heads(2, 0, 5, 4);
    tensor<float> empty_1 = no_batch, empty_2 = no_heads;
    attn::mpi::linear(view(no_batch), view(no_batch), view(no_batch), view(empty_1), MPI_COMM_WORLD,
                      {.causal = causal});
    attn::mpi::linear(view(no_heads), view(no_heads), view(no_heads), view(empty_2), MPI_COMM_WORLD,
                      {.causal = causal});
  }
}

TEST_CASE("mpi linear: any communicator", "[linear]") {
  // Two halves, each with a sequence of its own, their ranks turned round.
  const int size = process_count(), rank = own_rank();
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, size - rank, &half);
  int place = 0, places = 0;
  MPI_Comm_rank(half, &place), MPI_Comm_size(half, &places);
  const idx_t tokens = 70;
  const auto x = cast<float>(random_normal(static_cast<std::uint64_t>(rank % 2) + 1, 1, 1, tokens * places, 4));
  tensor<float> wanted(1, 1, x.length(), 4), out(1, 1, tokens, 4, rubbish);
  attn::linear(view(x), view(x), view(x), view(wanted), {.causal = true});
  const auto own = rows(x, place * tokens, tokens);
  attn::mpi::linear(view(own), view(own), view(own), view(out), half, {.causal = true});
  CHECK(relative_error(out, rows(wanted, place * tokens, tokens)) <= bound<float>);
  attn::mpi::linear(view(own), view(own), view(own), view(out), MPI_COMM_SELF);
  tensor<float> alone(1, 1, tokens, 4);
  attn::linear(view(own), view(own), view(own), view(alone));
  CHECK(out == alone);
  MPI_Comm_free(&half);
}

TEST_CASE("mpi linear: what is refused, is refused by all", "[linear]") {
  const bool last = own_rank() == process_count() - 1;
  const auto refused = [&](idx_t batch, idx_t heads, idx_t kv_heads, idx_t dim, idx_t dim_v, idx_t tokens,
                           idx_t queries, const attn::linear_options<float>& options) {
    const tensor<float> q(batch, heads, queries, dim, 1), k(batch, kv_heads, tokens, dim, 1),
        v(batch, kv_heads, tokens, dim_v, 1);
    tensor<float> out(batch, heads, queries, dim_v, rubbish);
    const tensor<float> before = out;
    const std::string message = refusal_of_all("mpi::linear", [&] {
      attn::mpi::linear(view(q), view(k), view(v), view(out), MPI_COMM_WORLD, options);
    });
    CHECK(out == before);
    return message;
  };
  CHECK(contains(refused(2, 4, 3, 8, 8, 10, 10, {}), "key heads that divide"));
  const std::vector<idx_t> three = {1, 1, 1}, long_one = {1, 10 * process_count() + 1};
  CHECK(contains(refused(2, 4, 2, 8, 8, 10, 10, {.lengths = three}), "lengths, one per batch item"));
  CHECK(contains(refused(2, 4, 2, 8, 8, 10, 10, {.lengths = long_one}), "lengths from 0 to"));
  CHECK(contains(refused(2, 4, 2, 8, 8, 10, 10, {.eps = -1}), "eps >= 0"));
  tensor<float> decay(2, 2, 10, 1, 0.5f);
  CHECK(contains(refused(2, 4, 2, 8, 8, 10, 10, {.decay = row_view(decay)}), "causal with decay"));
  if (last) decay.data[7] = 1.5f;  // on one process alone
  CHECK(contains(refused(2, 4, 2, 8, 8, 10, 10, {.causal = true, .decay = row_view(decay)}), "decay from 0 to 1"));
  if (last) decay.data[7] = 0.5f;
  tensor<float> state(2, 2, 8, 8), logs(2, 2, 10, 1, -1), bonus(1, 1, 4, 8, 1);
  const auto alone = [&](auto set) {  // on the last process
    attn::linear_options<float> options{.causal = true};
    if (last) set(options);
    return refused(2, 4, 2, 8, 8, 10, 10, options);
  };
  CHECK(contains(alone([&](auto& o) { o.scale = 0.5f; }), "scale 1 over processes"));
  CHECK(contains(alone([&](auto& o) { o.log_decay = view(logs); }), "decay in place of log_decay"));
  CHECK(contains(alone([&](auto& o) { o.bonus = {bonus.data.data(), {4, 8}}; }), "no bonus over processes"));
  CHECK(contains(alone([&](auto& o) { o.key_mask = seeing_mask(10); }), "no key_mask over processes"));
  CHECK(contains(alone([&](auto& o) { o.initial_state = view(state); }), "no initial or final state"));
  CHECK(contains(alone([&](auto& o) { o.final_state = view(state); }), "no initial or final state"));
  CHECK(contains(alone([&](auto& o) { o.final_weights = row_view(decay); }), "no initial or final state"));
  if (process_count() == 1) return;
  CHECK(contains(refused(last ? 3 : 2, 4, 2, 8, 8, 10, 10, {}), "a batch on all processes"));
  CHECK(contains(refused(2, last ? 2 : 4, 2, 8, 8, 10, 10, {}), "heads on all processes"));
  CHECK(contains(refused(2, 4, last ? 4 : 2, 8, 8, 10, 10, {}), "key heads on all processes"));
  CHECK(contains(refused(2, 4, 2, last ? 7 : 8, 8, 10, 10, {}), "a query dim on all processes"));
  CHECK(contains(refused(2, 4, 2, 8, last ? 7 : 8, 10, 10, {}), "a value dim on all processes"));
  CHECK(contains(refused(2, 4, 2, 8, 8, 10, 10, {.causal = last}), "the same options on all processes"));
  CHECK(contains(refused(2, 4, 2, 8, 8, 10, 10, {.eps = last ? 0.f : 1.f}), "the same options on all processes"));
  const std::vector<idx_t> others = {last ? 9 : 8, 3};
  CHECK(contains(refused(2, 4, 2, 8, 8, 10, 10, {.lengths = others}), "the same options on all processes"));
  attn::linear_options<float> one_decays{.causal = true};
  if (last) one_decays.decay = row_view(decay);
  CHECK(contains(refused(2, 4, 2, 8, 8, 10, 10, one_decays), "the same options on all processes"));
  const std::vector<idx_t> all = {10 * process_count(), 10 * process_count()};
  const std::vector<idx_t> fewer = {10 * process_count(), 10 * process_count() - 1};
  CHECK(contains(refused(2, 4, 2, 8, 8, 10, 10, {.causal = true, .query_lengths = all, .key_lengths = fewer}),
                 "causal queries at the positions"));
  // Of process 0 a query too few, of the last one a query too many.
  const idx_t more = last ? 1 : own_rank() == 0 ? -1 : 0;
  CHECK(contains(refused(2, 4, 2, 8, 8, 10, 10 + more, {.causal = true}), "causal queries at the positions"));

  const tensor<double> x(1, 1, 3, 4, 1);
  const tensor<float> y(1, 1, 3, 4, 1);
  tensor<double> out_x(1, 1, 3, 4);
  tensor<float> out_y(1, 1, 3, 4);
  const auto message = refusal_of_all("mpi::linear", [&] {
    if (last)
      attn::mpi::linear(view(x), view(x), view(x), view(out_x), MPI_COMM_WORLD);
    else
      attn::mpi::linear(view(y), view(y), view(y), view(out_y), MPI_COMM_WORLD);
  });
  CHECK(contains(message, "the element type of process 0"));
  CHECK(contains(refusal_of_all("mpi::linear", [&] {
                   attn::mpi::linear(view(y), view(y), view(y), view(out_y), MPI_COMM_NULL);
                 }),
                 "a communicator"));
  const attn::tensor_view<const float> negative(y.data.data(), {1, 1, last ? -3 : 3, 4});
  CHECK(contains(refusal_of_all("mpi::linear", [&] {
                   attn::mpi::linear(view(y), negative, negative, view(out_y), MPI_COMM_WORLD);
                 }),
                 "extents >= 0"));
}

}  // namespace
}  // namespace testing::linear_tests
