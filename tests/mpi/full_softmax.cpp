// attn::mpi::full_softmax against attn::full_softmax on the whole.
#include <attn/mpi/full_softmax.hpp>

#include "softmax_problem.hpp"

namespace testing::full_softmax_tests {
namespace {

template <class S>
struct outcome {
  tensor<S> out;
  tensor<attn::compute_type<S>> lse;
};

template <class S>
outcome<S> whole(const problem<S>& p) {
  using T = attn::compute_type<S>;
  outcome<S> r{tensor<S>(2, 4, p.q.length(), 12, S(7)), tensor<T>(2, 4, p.q.length(), 1, 7)};
  auto o = p.template options<attn::full_softmax_options<S>>();
  o.lse = row_view(r.lse);
  if (p.chosen.score)
    attn::full_softmax(view(p.q), view(p.k), view(p.v), view(r.out), o, problem<S>::score);
  else
    attn::full_softmax(view(p.q), view(p.k), view(p.v), view(r.out), o);
  return r;
}

template <class S>
outcome<S> own_part(const problem<S>& p, spread how, attn::execution& exec) {
  using T = attn::compute_type<S>;
  const tensor<S> q = rows(p.q, own_rows(p.q.length(), how)), k = rows(p.k, own_rows(p.k.length(), how)),
                  v = rows(p.v, own_rows(p.k.length(), how));
  outcome<S> r{tensor<S>(2, 4, q.length(), 12, S(7)), tensor<T>(2, 4, q.length(), 1, 7)};
  auto o = p.template options<attn::mpi::full_softmax_options<S>>();
  o.zigzag = how == spread::zigzag;
  if (p.chosen.lse) o.lse = row_view(r.lse);
  if (p.chosen.score)
    attn::mpi::full_softmax(view(q), view(k), view(v), view(r.out), MPI_COMM_WORLD, o, problem<S>::score, exec);
  else
    attn::mpi::full_softmax(view(q), view(k), view(v), view(r.out), MPI_COMM_WORLD, o, exec);
  return r;
}

template <class S>
void check(const problem<S>& p, spread how) {
  attn::execution serial;
  const outcome<S> all = whole(p), part = own_part(p, how, serial);
  const auto own = own_rows(p.q.length(), how);
  CAPTURE(int(how), p.chosen.causal, p.chosen.terms, p.chosen.score, p.chosen.lse, p.q.length(), p.k.length());
  CHECK(error_of_rows(part.out, all.out, own) <= allowed<S>);
  if (p.chosen.lse) CHECK(error_of_rows(part.lse, all.lse, own) <= allowed_lse<S>);
}

template <class S>
void check_choices() {
  using choice = typename problem<S>::choice;
  for (spread how : spreads) {
    for (bool causal : {false, true}) {
      check<S>(problem<S>({.causal = causal}), how);
      check<S>(problem<S>({.causal = causal, .terms = true, .lse = false, .kv_heads = 1}), how);
      check<S>(problem<S>({.causal = causal, .terms = true, .score = true, .kv_heads = 4}), how);
      check<S>(problem<S>({.causal = causal, .score = true, .queries = 23, .keys = 90}), how);
      check<S>(problem<S>({.causal = causal, .terms = true, .queries = 90, .keys = 23}), how);  // rows without a key
    }
    for (idx_t length : {0, 1, 3}) check<S>(problem<S>(choice{.causal = true, .queries = length, .keys = length}), how);
  }
}

}  // namespace

TEST_CASE("mpi::full_softmax: float gives what one process gives", "[full_softmax]") { check_choices<float>(); }
TEST_CASE("mpi::full_softmax: double gives what one process gives", "[full_softmax]") { check_choices<double>(); }
TEST_CASE("mpi::full_softmax: 16-bit elements are rounded once", "[full_softmax]") { check_choices<Eigen::bfloat16>(); }

TEST_CASE("mpi::full_softmax: long sequences, in pieces of heads", "[full_softmax]") {
  for (spread how : {spread::uneven, spread::zigzag})
    check<float>(problem<float>({.causal = true, .queries = 3000, .keys = 3000}), how);
}

TEST_CASE("mpi::full_softmax: the bits do not depend on threads or batch, and one process has those of the call",
          "[full_softmax]") {
  const problem<float> p({.causal = true, .terms = true, .queries = 700, .keys = 700});
  attn::execution serial, threads(2, 0);
  const outcome<float> one = own_part(p, spread::zigzag, serial), two = own_part(p, spread::zigzag, threads);
  CHECK(one.out == two.out);
  CHECK(one.lse == two.lse);
  problem<float> alone = p;
  for (tensor<float>* x : {&alone.q, &alone.k, &alone.v})  // the second item becomes the first
    std::copy(x->data.begin() + x->size() / 2, x->data.end(), x->data.begin());
  const outcome<float> other = own_part(alone, spread::zigzag, serial);
  const auto middle = one.out.size() / 2;
  CHECK(std::equal(other.out.data.begin(), other.out.data.begin() + middle, one.out.data.begin() + middle));
  if (process_count() == 1) CHECK(own_part(p, spread::even, serial).out == whole(p).out);
}

TEST_CASE("mpi::full_softmax: Eigen matrices, without options, and a part of the processes", "[full_softmax]") {
  const int rank = own_rank(), size = process_count();
  MPI_Comm half;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);  // in the opposite order
  const auto random = [](std::uint64_t seed) -> Eigen::MatrixXf {
    const tensor<float> x = cast<float>(random_normal(seed, 1, 1, 40, 8));
    return Eigen::Map<const Eigen::MatrixXf>(x.data.data(), 40, 8);
  };
  const Eigen::MatrixXf q = random(1), k = random(2), v = random(3);
  Eigen::MatrixXf all(40, 8);
  attn::full_softmax(q, k, v, all, {.causal = true});
  int members = 0, place = 0;
  MPI_Comm_size(half, &members);
  MPI_Comm_rank(half, &place);
  CHECK(members == (rank % 2 ? size / 2 : (size + 1) / 2));
  const idx_t begin = 40 * place / members, count = 40 * (place + 1) / members - begin;
  Eigen::MatrixXf out(count, 8);
  attn::mpi::full_softmax(q.middleRows(begin, count), k.middleRows(begin, count), v.middleRows(begin, count), out, half,
                          {.causal = true});
  CHECK((out - all.middleRows(begin, count)).norm() <= static_cast<float>(allowed<float>) * all.norm());
  attn::full_softmax(q, k, v, all);
  attn::mpi::full_softmax(q.middleRows(begin, count), k.middleRows(begin, count), v.middleRows(begin, count), out,
                          half);
  CHECK((out - all.middleRows(begin, count)).norm() <= static_cast<float>(allowed<float>) * all.norm());
  MPI_Comm_free(&half);
}

TEST_CASE("mpi::full_softmax: messages of the caller are not those of the call", "[full_softmax]") {
  const int rank = own_rank(), size = process_count(), next = (rank + 1) % size, before = (rank + size - 1) % size;
  MPI_Comm copy;
  MPI_Comm_dup(MPI_COMM_WORLD, &copy);
  for (MPI_Comm comm : {MPI_COMM_WORLD, copy, copy}) {  // new, and known
    int received = -1, from_any = -1;
    MPI_Request sent, any;
    MPI_Isend(&rank, 1, MPI_INT, next, 0, comm, &sent);  // with a tag of the call's own
    const std::vector<float> x(6 * 8, 0.5f);
    std::vector<float> y(x.size());
    const auto attend = [&] {
      const attn::tensor_view<const float> tokens(x.data(), {1, 2, 3, 8});
      attn::mpi::full_softmax(tokens, tokens, tokens, attn::tensor_view<float>(y.data(), {1, 2, 3, 8}), comm);
      CHECK(y == x);
    };
    attend();
    MPI_Recv(&received, 1, MPI_INT, before, 0, comm, MPI_STATUS_IGNORE);
    CHECK(received == before);
    MPI_Wait(&sent, MPI_STATUS_IGNORE);
    MPI_Irecv(&from_any, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &any);
    attend();
    MPI_Send(&rank, 1, MPI_INT, next, 7, comm);
    MPI_Wait(&any, MPI_STATUS_IGNORE);
    CHECK(from_any == before);
  }
  MPI_Comm_free(&copy);
}

TEST_CASE("mpi::full_softmax: the bytes a process sends", "[full_softmax]") {
  const problem<float> p({.causal = true, .queries = 64, .keys = 64});
  attn::execution serial;
  const std::size_t before = attn::detail::sent_bytes();
  own_part(p, spread::even, serial);
  const int size = process_count(), rank = own_rank();
  const idx_t tokens = 64 - std::ssize(rows_of(64, spread::even, (rank + 1) % size, size));
  const std::size_t keys = size > 1 ? static_cast<std::size_t>(tokens * 2 * 2 * (9 + 12)) * sizeof(float) : 0;
  CHECK(attn::detail::sent_bytes() - before ==
        keys + static_cast<std::size_t>(size - 1) * sizeof(attn::detail::process_shape));
}

TEST_CASE("mpi::full_softmax: all processes refuse what does not fit one", "[full_softmax]") {
  using options = attn::mpi::full_softmax_options<float>;
  const bool last = own_rank() + 1 == process_count(), several = process_count() > 1;
  const std::vector<float> slopes(4, 0.5f), others(4, 0.25f), few(3, 0.5f);
  tensor<float> q(2, 4, 5, 8, 0.5f), k(2, 2, 6, 8, 0.25f), v(2, 2, 6, 7, 1), out(2, 4, 5, 7, 7), lse(2, 4, 5, 1, 7);
  const auto check = [&](const char* says, const auto& x, const auto& y, const auto& z, auto& to, const options& o,
                         MPI_Comm comm = MPI_COMM_WORLD) {
    check_all_refuse("mpi::full_softmax", says,
                     [&] { attn::mpi::full_softmax(view(x), view(y), view(z), view(to), comm, o); });
    CHECK(std::all_of(to.data.begin(), to.data.end(), [](const auto& e) { return static_cast<float>(e) == 7; }));
  };
  const auto here = [&](const auto& wrong, const auto& right) -> const auto& { return last ? wrong : right; };
  check("MPI_COMM_NULL", q, k, v, out, {}, MPI_COMM_NULL);
  // Wrong in itself, on one process.
  check("value length", q, k, here(rows(v, 0, 5), v), out, {});
  check("softcap", q, k, v, out, {.softcap = last ? -1.0f : 1.0f});
  check("alibi_slopes", q, k, v, out, {.alibi_slopes = last ? few : slopes});
  check_all_refuse("mpi::full_softmax", "extents >= 0", [&] {
    const attn::tensor_view<const float> negative(k.data.data(), {2, 2, last ? -1 : 6, 8});
    attn::mpi::full_softmax(view(std::as_const(q)), negative, view(std::as_const(v)), view(out), MPI_COMM_WORLD);
  });
  if (!several) return;
  // Right in itself, but not what the others have.
  const tensor<float> q4(2, 4, 5, 4), k4(2, 2, 6, 4), k4h(2, 4, 6, 8), v4h(2, 4, 6, 7), v3(2, 2, 6, 3);
  tensor<float> out3(2, 4, 5, 3, 7), out1(1, 4, 5, 7, 7), out2(2, 2, 5, 7, 7);
  check("dim", here(q4, q), here(k4, k), v, out, {});
  check("key heads", q, here(k4h, k), here(v4h, v), out, {});
  check("value dim", q, k, here(v3, v), last ? out3 : out, {});
  check("batch", here(tensor<float>(1, 4, 5, 8), q), here(tensor<float>(1, 2, 6, 8), k),
        here(tensor<float>(1, 2, 6, 7), v), last ? out1 : out, {});
  check("heads", here(tensor<float>(2, 2, 5, 8), q), k, v, last ? out2 : out, {});
  check("options", q, k, v, out, {.causal = last});
  check("options", q, k, v, out, {.scale = last ? std::optional<float>(1.0f) : std::nullopt});
  check("options", q, k, v, out, {.alibi_slopes = last ? others : slopes});
  check("zigzag", rows(q, 0, last ? 1 : 5), k, v, last ? out = tensor<float>(2, 4, 1, 7, 7) : out, {.zigzag = true});
  const std::string type = "the element type of process 0";
  if (last) {
    const tensor<double> x(2, 4, 5, 8), y(2, 2, 6, 8), z(2, 2, 6, 7);
    tensor<double> to(2, 4, 5, 7, 7);
    check_all_refuse("mpi::full_softmax", type,
                     [&] { attn::mpi::full_softmax(view(x), view(y), view(z), view(to), MPI_COMM_WORLD); });
  } else {
    check_all_refuse("mpi::full_softmax", type, [&] {
      attn::mpi::full_softmax(view(std::as_const(q)), view(std::as_const(k)), view(std::as_const(v)), view(out),
                              MPI_COMM_WORLD);
    });
  }
}

}  // namespace testing::full_softmax_tests
