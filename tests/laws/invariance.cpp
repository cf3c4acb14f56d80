// Law 13. Invariance (execution::set_invariant): a row has the same bits however it is asked for: with other rows or
// alone, in chunks of any length, in a batch, with padding, by any number of threads. An operator obeys it, or refuses
// the call before anything is written. Caches in pages: softmax/shared_prefixes.cpp; layers: layers/laws.cpp.
#include <optional>

#include "laws/gradient_law.hpp"
#include "laws/stored.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"

namespace testing::invariance_tests {
namespace {

attn::execution invariant_execution(int threads = 1) {
  attn::execution one(threads, 0);
  one.set_invariant(true);
  return one;
}

// Nothing where the operator refuses, with nothing written.
template <class T>
std::optional<law_result<T>> try_attend(const law_operator<T>& op, const law_shape& s, const law_inputs<T>& in,
                                        attn::execution& execution) {
  law_result<T> r = fresh_result(op, s);
  const law_result<T> before = r;
  try {
    op.bind(s)(call_of(in, r, execution));
  } catch (const std::invalid_argument& error) {
    const std::string message = error.what();
    CAPTURE(message);
    CHECK(well_formed(message, op.of));
    CHECK(message.find("invariant") != std::string::npos);
    CHECK(identical(r, before));
    return std::nullopt;
  }
  return r;
}

// Rows [begin, begin + count) of every head.
template <class T>
law_result<T> rows(const law_result<T>& x, idx_t begin, idx_t count) {
  return {rows(x.out, begin, count), x.lse.empty() ? tensor<T>() : rows(x.lse, begin, count)};
}
template <class T>
law_inputs<T> rows(const law_inputs<T>& x, idx_t begin, idx_t count, idx_t keys) {
  return {rows(x.q, begin, count), rows(x.k, 0, keys), rows(x.v, 0, keys)};
}
// Rows [0, n) of batch item b.
template <class T>
tensor<T> item(const tensor<T>& x, idx_t b, idx_t n) {
  if (x.extents == tensor<T>().extents) return {};
  tensor<T> one(1, x.heads(), n, x.dim());
  for (idx_t h = 0; h < x.heads(); ++h)
    for (idx_t i = 0; i < n; ++i)
      for (idx_t d = 0; d < x.dim(); ++d) one(0, h, i, d) = x(b, h, i, d);
  return one;
}

std::vector<law_shape> shapes() {
  std::vector<law_shape> all = law_shapes({7, 65, 130});
  all.push_back({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 900, .keys = 900, .dim = 16, .value_dim = 32});
  return all;
}

// The numbers of queries that a call has, and the places where it begins: the first ones, some, the last ones.
template <class Visit>
void each_part(idx_t length, const Visit& visit) {
  for (const idx_t count : {1, 7, 16, 64})
    for (const idx_t begin : {idx_t(0), length / 2 + 1, length - count})
      if (begin >= 0 && begin + count <= length) visit(begin, count);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("law 13: rows have the same bits however they are asked for", "[invariance]", exact_types) {
  attn::execution serial = invariant_execution(), four = invariant_execution(4);
  for (const auto& op : operators<TestType>())
    for (law_shape shape : op.invariant ? shapes() : law_shapes({7})) {
      shape = fitted(op, shape);
      INFO(op.name << ", " << text(shape));
      const law_inputs<TestType> in = random_inputs<TestType>(shape);
      const std::optional<law_result<TestType>> whole = try_attend(op, shape, in, serial);
      CHECK(bool(whole) == op.invariant);
      if (!whole) continue;
      CHECK(identical(attend(op, shape, in, four), *whole));
      CHECK(close(op, attend(op, shape, in), *whole));
      for (idx_t count : {1, 7, 16, 64}) {
        if (!op.stream || !op.invariant_stream || (count == 1 && shape.queries > 200)) continue;
        INFO("in chunks of " << count);
        std::vector<idx_t> chunks(static_cast<std::size_t>(shape.queries / count), count);
        if (shape.queries % count > 0) chunks.push_back(shape.queries % count);
        CHECK(identical(attend_in_chunks(op, shape, in, chunks, serial), *whole));
      }
      each_part(shape.queries, [&](idx_t begin, idx_t count) {
        if (!op.queries_alone) return;
        INFO("queries from " << begin << " on, " << count << " of them");
        law_shape part = shape;
        part.queries = count, part.keys = op.causal ? begin + count : shape.keys;
        if (!op.causal && begin + count < shape.keys) return;  // the last queries are at the last keys
        const law_result<TestType> alone =
            attend(op, part, rows(in, begin, count, part.keys), count == 7 ? four : serial);
        CHECK(identical(alone, rows(*whole, begin, count)));
      });
    }
}

TEMPLATE_LIST_TEST_CASE("law 13: neither the batch nor padding changes a bit", "[invariance]", exact_types) {
  attn::execution serial = invariant_execution();
  for (const auto& op : operators<TestType>()) {
    if (!op.invariant || !op.padding) continue;
    for (law_shape shape : law_shapes({20, 130})) {
      shape = fitted(op, shape), shape.batch = 3;
      INFO(op.name << ", " << text(shape));
      const std::vector<idx_t> lengths = {shape.queries / 2, shape.queries, 3};
      const law_inputs<TestType> in = random_inputs<TestType>(shape);
      const law_result<TestType> padded = attend(op, shape, in, serial, lengths);
      for (idx_t b = 0; b < shape.batch; ++b) {
        const idx_t n = lengths[static_cast<std::size_t>(b)];
        law_shape alone = shape;
        alone.batch = 1, alone.first_batch = b, alone.queries = alone.keys = n;
        const law_result<TestType> own =
            attend(op, alone, {item(in.q, b, n), item(in.k, b, n), item(in.v, b, n)}, serial);
        CHECK((identical(own.out, item(padded.out, b, n)) && identical(own.lse, item(padded.lse, b, n))));
      }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("law 13: gradients of queries have the same bits", "[invariance]", exact_types) {
  attn::execution serial = invariant_execution(), four = invariant_execution(4);
  for (const auto& op : operators<TestType>()) {
    if (!op.invariant || !op.invariant_backward) continue;
    const law_shape shorter{.queries = 130, .keys = 130, .dim = 33, .value_dim = 16},
        longer{.batch = 1, .heads = 2, .kv_heads = 1, .queries = 1100, .keys = 1100, .dim = 16};
    for (law_shape shape : {shorter, longer}) {
      shape = fitted(op, shape);
      INFO(op.name << ", " << text(shape));
      const law_inputs<TestType> in = random_inputs<TestType>(shape);
      const tensor<TestType> d_out = random_d_out<TestType>(shape);
      const law_gradients<TestType> whole = differentiate(op, shape, in, d_out, serial);
      CHECK(identical(differentiate(op, shape, in, d_out, four), whole));
      each_part(shape.queries, [&](idx_t begin, idx_t count) {
        if (!op.queries_alone || !op.causal) return;
        INFO("queries from " << begin << " on, " << count << " of them");
        law_shape part = shape;
        part.queries = count, part.keys = begin + count;
        const law_gradients<TestType> alone =
            differentiate(op, part, rows(in, begin, count, part.keys), rows(d_out, begin, count), serial);
        CHECK(identical(alone.q, rows(whole.q, begin, count)));
      });
      if (!op.padding || shape.batch == 1) continue;  // those of keys too: all their queries are there
      const idx_t n = shape.queries - 50;
      const law_gradients<TestType> padded =
          differentiate(op, shape, in, d_out, serial, std::vector<idx_t>(static_cast<std::size_t>(shape.batch), n));
      law_shape alone = shape;
      alone.queries = alone.keys = n;
      if (!op.queries_alone) continue;
      const law_gradients<TestType> own = differentiate(op, alone, rows(in, 0, n, n), rows(d_out, 0, n), serial);
      CHECK(identical(rows(padded.q, 0, n), own.q));
      CHECK(identical(rows(padded.k, 0, n), own.k));
      CHECK(identical(rows(padded.v, 0, n), own.v));
    }
  }
}

#if !defined(ATTN_TEST_FLOAT_ALONE)
TEST_CASE("law 13: rows of bfloat16 elements have the same bits", "[invariance]") {
  using S = Eigen::bfloat16;
  namespace s = stored;
  attn::execution serial = invariant_execution(), four = invariant_execution(4);
  constexpr idx_t length = 450;
  for (const auto& op : stored_operators<S>()) {
    if (op.name != "full_softmax causal" && op.name != "sliding_window causal") continue;
    INFO(op.name);
    const tensor<S> q = s::drawn(1, 1, s::heads, length, s::dim), k = s::drawn(2, 1, op.kv_heads, length, s::dim),
                    v = s::drawn(3, 1, op.kv_heads, length, s::value_dim),
                    d = s::drawn(4, 1, s::heads, length, s::value_dim);
    struct results {
      tensor<S> out, dq, dk, dv;
    };
    const auto run = [&](idx_t begin, idx_t count, attn::execution& execution) {
      const idx_t keys = begin + count;
      results r{tensor<S>(1, s::heads, count, s::value_dim), tensor<S>(1, s::heads, count, s::dim),
                tensor<S>(1, op.kv_heads, keys, s::dim), tensor<S>(1, op.kv_heads, keys, s::value_dim)};
      op.run({view(q).slice(2, begin, count), view(k).slice(2, 0, keys), view(v).slice(2, 0, keys),
              view(d).slice(2, begin, count), view(r.out), view(r.dq), view(r.dk), view(r.dv), {}, execution});
      return r;
    };
    const results whole = run(0, length, serial), shared = run(0, length, four);
    CHECK((identical(whole.out, shared.out) && identical(whole.dq, shared.dq) && identical(whole.dk, shared.dk) &&
           identical(whole.dv, shared.dv)));
    each_part(length, [&](idx_t begin, idx_t count) {
      INFO("queries from " << begin << " on, " << count << " of them");
      const results alone = run(begin, count, count == 7 ? four : serial);
      CHECK(identical(alone.out, rows(whole.out, begin, count)));
      CHECK(identical(alone.dq, rows(whole.dq, begin, count)));
    });
  }
}
#endif

}  // namespace testing::invariance_tests
