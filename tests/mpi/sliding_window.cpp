// attn::mpi::sliding_window against attn::sliding_window on the whole.
#include <attn/core/threads.hpp>
#include <attn/mpi/sliding_window.hpp>

#include "softmax_problem.hpp"

namespace testing::sliding_window_tests {
namespace {

enum class globals { none, some, own_projections };

struct window {
  idx_t left = 5, right = 3;
  std::vector<idx_t> dilation{};
  globals positions = globals::none;
};

template <class S>
struct window_problem : problem<S> {
  using T = attn::compute_type<S>;
  window w;
  std::vector<idx_t> positions;
  tensor<S> q_global, k_global, v_global;

  window_problem(const typename problem<S>::choice& c, window given) : problem<S>(c), w(std::move(given)) {
    if (w.positions != globals::none) positions = {c.keys / 2, 0, 3, c.keys - 2 > 0 ? c.keys - 2 : 1, c.keys + 7, 4, 3};
    q_global = cast<S>(random_normal(11, 2, 4, c.queries, 9));
    k_global = cast<S>(random_normal(12, 2, c.kv_heads, c.keys, 9));
    v_global = cast<S>(random_normal(13, 2, c.kv_heads, c.keys, 12));
  }
  template <class Options>
  Options window_options(const tensor<S>& own_q, const tensor<S>& own_k, const tensor<S>& own_v) const {
    auto o = this->template options<Options>();
    o.left = w.left, o.right = w.right, o.dilation = w.dilation, o.global_positions = positions;
    if (w.positions == globals::own_projections)
      o.q_global = view(own_q), o.k_global = view(own_k), o.v_global = view(own_v);
    return o;
  }
};

template <class S>
struct outcome {
  tensor<S> out;
  tensor<attn::compute_type<S>> lse;
};

template <class S>
outcome<S> whole(const window_problem<S>& p) {
  using T = attn::compute_type<S>;
  outcome<S> r{tensor<S>(2, 4, p.q.length(), 12, S(7)), tensor<T>(2, 4, p.q.length(), 1, 7)};
  auto o = p.template window_options<attn::sliding_window_options<S>>(p.q_global, p.k_global, p.v_global);
  o.lse = row_view(r.lse);
  if (p.chosen.score)
    attn::sliding_window(view(p.q), view(p.k), view(p.v), view(r.out), o, problem<S>::score);
  else
    attn::sliding_window(view(p.q), view(p.k), view(p.v), view(r.out), o);
  return r;
}

template <class S>
outcome<S> own_part(const window_problem<S>& p, const std::vector<idx_t>& queries, const std::vector<idx_t>& keys,
                    attn::execution& exec) {
  using T = attn::compute_type<S>;
  const tensor<S> q = rows(p.q, queries), k = rows(p.k, keys), v = rows(p.v, keys), gq = rows(p.q_global, queries),
                  gk = rows(p.k_global, keys), gv = rows(p.v_global, keys);
  outcome<S> r{tensor<S>(2, 4, q.length(), 12, S(7)), tensor<T>(2, 4, q.length(), 1, 7)};
  auto o = p.template window_options<attn::mpi::sliding_window_options<S>>(gq, gk, gv);
  if (p.chosen.lse) o.lse = row_view(r.lse);
  if (p.chosen.score)
    attn::mpi::sliding_window(view(q), view(k), view(v), view(r.out), MPI_COMM_WORLD, o, problem<S>::score, exec);
  else
    attn::mpi::sliding_window(view(q), view(k), view(v), view(r.out), MPI_COMM_WORLD, o, exec);
  return r;
}

template <class S>
void check(const window_problem<S>& p, spread how) {
  attn::execution serial;
  const auto own = own_rows(p.q.length(), how);
  const outcome<S> all = whole(p), part = own_part(p, own, own_rows(p.k.length(), how), serial);
  CAPTURE(int(how), p.w.left, p.w.right, p.w.dilation.size(), int(p.w.positions), p.chosen.causal, p.chosen.terms,
          p.chosen.score, p.chosen.lse, p.q.length(), p.k.length());
  CHECK(error_of_rows(part.out, all.out, own) <= allowed<S>);
  if (p.chosen.lse) CHECK(error_of_rows(part.lse, all.lse, own) <= allowed_lse<S>);
}

template <class S>
void check_choices(std::initializer_list<spread> spreads) {
  using choice = typename problem<S>::choice;
  const window windows[] = {{},
                            {.left = 0, .right = 0},
                            {.left = 40, .right = 1, .dilation = {3}},  // over several processes
                            {.left = attn::unlimited, .right = 2, .dilation = {1, 4, 2, 7}},
                            {.left = attn::unlimited, .right = attn::unlimited, .dilation = {attn::unlimited}}};
  for (spread how : spreads)
    for (window w : windows)
      for (globals positions : {globals::none, globals::some, globals::own_projections})
        for (bool causal : {false, true}) {
          w.positions = positions;
          check<S>({{.causal = causal}, w}, how);
          check<S>({choice{.causal = causal, .terms = true, .lse = false, .kv_heads = 1}, w}, how);
          check<S>({choice{.causal = causal, .terms = true, .score = true, .queries = 41, .keys = 90}, w}, how);
          check<S>({choice{.causal = causal, .score = causal, .queries = 90, .keys = 23}, w}, how);
          if (causal) check<S>({choice{.causal = true, .terms = true, .queries = 2, .keys = 2}, w}, how);
        }
  check<S>({choice{.queries = 0, .keys = 0}, {.positions = globals::some}}, spread::even);
}

}  // namespace

TEST_CASE("mpi::sliding_window: float gives what one process gives", "[sliding_window]") {
  check_choices<float>({spread::even, spread::uneven, spread::last, spread::every_second});
}
TEST_CASE("mpi::sliding_window: 16-bit elements are rounded once", "[sliding_window]") {
  check_choices<Eigen::bfloat16>({spread::uneven});
}

TEST_CASE("mpi::sliding_window: the bits of one process where ranges begin at its chunks", "[sliding_window]") {
  for (auto [left, right, chunk] : {std::array<idx_t, 3>{100, 20, 384}, {700, 0, 768}, {0, 500, 576}}) {
    const int size = process_count(), rank = own_rank();
    std::vector<idx_t> own;
    idx_t before = 0, tokens = 0;
    for (int p = 0; p < size; ++p) {
      if (p < rank) before += chunk * (1 + p % 2);
      tokens += chunk * (1 + p % 2);
    }
    tokens -= 17;  // the last range ends anywhere
    for (idx_t i = before; i < std::min(tokens, before + chunk * (1 + rank % 2)); ++i) own.push_back(i);
    const window_problem<float> p({.terms = true, .queries = tokens, .keys = tokens}, {.left = left, .right = right});
    attn::execution threads(2, 0);
    const outcome<float> all = whole(p), part = own_part(p, own, own, threads);
    CAPTURE(left, right);
    CHECK(part.out == rows(all.out, own));
    CHECK(part.lse == rows(all.lse, own));
  }
}

// Most queries read the keys in place, and the others' are gathered on both sides.
TEST_CASE("mpi::sliding_window: long ranges", "[sliding_window]") {
  for (spread how : {spread::even, spread::uneven, spread::every_second})
    for (bool causal : {false, true})
      for (globals positions : {globals::none, globals::some})
        for (idx_t keys : {3000, 2500}) {
          check<float>({{.causal = causal, .terms = true, .score = true, .queries = 3000, .keys = keys},
                        {.left = 20, .right = 6, .dilation = {3}, .positions = positions}}, how);
          check<float>({{.causal = causal, .queries = keys, .keys = 3000},
                        {.left = 300, .right = 200, .positions = positions}}, how);
        }
}

TEST_CASE("mpi::sliding_window: the bits do not depend on threads", "[sliding_window]") {
  const window_problem<float> p({.causal = true, .terms = true, .queries = 700, .keys = 700},
                                {.left = 60, .right = 0, .positions = globals::some});
  attn::execution serial, threads(2, 0);
  const auto own = own_rows(700, spread::uneven);
  const outcome<float> one = own_part(p, own, own, serial), two = own_part(p, own, own, threads);
  CHECK(one.out == two.out);
  CHECK(one.lse == two.lse);
  if (process_count() == 1) CHECK(one.out == whole(p).out);
}

TEST_CASE("mpi::sliding_window: only what windows reach is sent", "[sliding_window]") {
  const window_problem<float> p({.queries = 400, .keys = 400}, {.left = 7, .right = 4});
  const auto own = own_rows(400, spread::even);
  attn::execution serial;
  const std::size_t before = attn::detail::sent_bytes();
  own_part(p, own, own, serial);
  const int size = process_count(), rank = own_rank();
  const idx_t reached = (rank + 1 < size ? 7 : 0) + (rank > 0 ? 4 : 0);
  CHECK(attn::detail::sent_bytes() - before ==
        static_cast<std::size_t>(reached * 2 * 2 * (9 + 12)) * sizeof(float) * (size > 1) +
            static_cast<std::size_t>(size - 1) * sizeof(attn::detail::process_shape));
}

TEST_CASE("mpi::sliding_window: a process copies what others want, and nothing between", "[sliding_window]") {
  namespace detail = attn::detail;
  const detail::process_communicator group("test", MPI_COMM_WORLD);
  const detail::sequence_split split(std::vector<idx_t>(static_cast<std::size_t>(group.size()), 50), false);
  const idx_t begin = 50 * group.rank(), end = begin + 50, all = split.tokens();
  tensor<float> x(1, 2, 50, 3);
  for (idx_t h = 0; h < 2; ++h)
    for (idx_t i = 0; i < 50; ++i)
      for (idx_t d = 0; d < 3; ++d) x(0, h, i, d) = static_cast<float>(begin + i + 1000 * h);
  detail::row_exchange<float> exchange(group, split, view(std::as_const(x)), [&](int p) {
    const idx_t first = 50 * p, last = first + 50;  // 7 tokens before its own, the last 2 of these, 4 behind them
    return detail::row_ranges{{std::max<idx_t>(first - 7, 0), first}, {last - 2, std::min(last + 4, all)}};
  });
  exchange.wait();
  CHECK(exchange.leaving.rows == (group.rank() + 1 < group.size() ? 7 : 0) + (group.rank() > 0 ? 4 : 0));
  idx_t at = 0;
  for (auto [first, last] : {std::array{std::max<idx_t>(begin - 7, 0), begin}, {end - 2, std::min(end + 4, all)}})
    for (idx_t i = first; i < last; ++i, ++at) {
      const auto row = exchange.rows.view(at, 1);
      CHECK(row(0, 0, 0, 2) == static_cast<float>(i));
      CHECK(row(0, 1, 0, 0) == static_cast<float>(i + 1000));
    }
  CHECK(exchange.rows.rows == at);
}

TEST_CASE("mpi::sliding_window: what lies beyond the windows changes no bit, even NaN", "[sliding_window]") {
  const window_problem<float> p({.queries = 200, .keys = 200}, {.left = 20, .right = 6});
  window_problem<float> dirty = p;
  const auto own = own_rows(200, spread::uneven);
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 2; ++h) dirty.k(b, h, 150, 0) = dirty.v(b, h, 150, 1) = NAN;
  attn::execution serial;
  const outcome<float> clean = own_part(p, own, own, serial), other = own_part(dirty, own, own, serial);
  for (idx_t i = 0; i < std::ssize(own); ++i) {
    const idx_t position = own[static_cast<std::size_t>(i)];
    const bool seen = position - 20 <= 150 && 150 <= position + 6;
    CAPTURE(position);
    if (seen)
      CHECK(std::isnan(other.out(0, 0, i, 0)));
    else
      CHECK(other.out(1, 3, i, 1) == clean.out(1, 3, i, 1));
  }
}

TEST_CASE("mpi::sliding_window: all processes refuse what does not fit one", "[sliding_window]") {
  using options = attn::mpi::sliding_window_options<float>;
  const bool last = own_rank() + 1 == process_count(), several = process_count() > 1;
  tensor<float> q(1, 2, 5, 8, 0.5f), k(1, 2, 5, 8, 0.25f), v(1, 2, 5, 7, 1), out(1, 2, 5, 7, 7);
  const std::vector<idx_t> one = {1}, two = {2}, zero = {0}, negative = {-1};
  const auto check = [&](const char* says, const options& o, MPI_Comm comm = MPI_COMM_WORLD) {
    check_all_refuse("mpi::sliding_window", says, [&] {
      attn::mpi::sliding_window(view(std::as_const(q)), view(std::as_const(k)), view(std::as_const(v)), view(out), comm,
                                o);
    });
    CHECK(std::all_of(out.data.begin(), out.data.end(), [](float e) { return e == 7; }));
  };
  check("MPI_COMM_NULL", {}, MPI_COMM_NULL);
  check("left >= 0", {.left = last ? -1 : 1});
  check("dilation >= 1", {.dilation = last ? zero : one});
  check("global positions >= 0", {.global_positions = last ? negative : one});
  check("k_global", {.q_global = last ? view(std::as_const(q)) : attn::tensor_view<const float>()});
  check("scale", {.scale = last ? HUGE_VALF : 1.0f});
  if (!several) return;
  check("options", {.left = last ? 3 : 4});
  check("options", {.right = last ? 3 : 4});
  check("options", {.causal = last});
  check("options", {.dilation = last ? two : one});
  check("options", {.global_positions = last ? two : one});
  if (last) k = tensor<float>(1, 1, 5, 8), v = tensor<float>(1, 1, 5, 7);
  check("key heads", {});
}

}  // namespace testing::sliding_window_tests
