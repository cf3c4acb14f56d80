// Laws of bfloat16: other instructions multiply it, from operands packed in other ways, with code of their own for
// what is not finite. Results near those of float, which law 0 compares with the references; and the laws that speak of
// bits: batch items alone, padding, memory with gaps, threads, and tokens that come later, forward and backward.
#include "laws/stored.hpp"
#include "support/catch.hpp"
#include "support/measure.hpp"

namespace testing::bfloat16_tests {
namespace {

using stored::dim, stored::drawn, stored::heads, stored::length, stored::value_dim;
using element = Eigen::bfloat16;
using values = tensor<element>;
using form = stored_operator<element>;

struct inputs {
  values q, k, v, d_out;
  std::vector<idx_t> lengths{};
};
struct results {
  values out, dq, dk, dv;
  bool operator==(const results&) const = default;
};

// One call. `gap`: rows lie so many elements further apart, with NaN between them.
results run(const form& op, const inputs& in, attn::execution& exec, idx_t gap = 0) {
  const element nan = std::numeric_limits<element>::quiet_NaN();
  struct memory {
    std::vector<element> numbers;
    std::array<idx_t, 4> extents{}, strides{};
    out_view<element> view() { return {numbers.data(), extents, strides}; }
  };
  const auto place = [&](const values& x) {
    const idx_t row = x.dim() + gap, head = x.length() * row;
    memory m{std::vector<element>(static_cast<std::size_t>(x.batch() * x.heads() * head), nan),
             x.extents,
             {x.heads() * head, head, row, 1}};
    for (idx_t b = 0; b < x.batch(); ++b)
      for (idx_t h = 0; h < x.heads(); ++h)
        for (idx_t i = 0; i < x.length(); ++i)
          for (idx_t d = 0; d < x.dim(); ++d) m.view()(b, h, i, d) = x(b, h, i, d);
    return m;
  };
  const auto taken = [&](memory& m) {
    values x(m.extents[0], m.extents[1], m.extents[2], m.extents[3]);
    for (idx_t b = 0; b < x.batch(); ++b)
      for (idx_t h = 0; h < x.heads(); ++h)
        for (idx_t i = 0; i < x.length(); ++i) {
          for (idx_t d = 0; d < x.dim(); ++d) x(b, h, i, d) = m.view()(b, h, i, d);
          for (idx_t d = x.dim(); d < x.dim() + gap; ++d)
            if (!std::isnan(static_cast<float>(*(&m.view()(b, h, i, 0) + d)))) FAIL("a gap was written");
        }
    return x;
  };
  memory q = place(in.q), k = place(in.k), v = place(in.v), d_out = place(in.d_out);
  // What an operator does not write (lsh has no gradient of k) stays.
  memory out = place(in.d_out), dq = place(in.q), dk = place(values(in.k.batch(), in.k.heads(), length, dim)),
         dv = place(in.v);
  op.run({q.view(), k.view(), v.view(), d_out.view(), out.view(), dq.view(), dk.view(), dv.view(), in.lengths, exec});
  return {taken(out), taken(dq), taken(dk), taken(dv)};
}
results run(const form& op, const inputs& in) {
  attn::execution serial;
  return run(op, in, serial);
}

inputs random_inputs(const form& op, idx_t batch = 2) {
  const idx_t width = op.square ? dim : value_dim;
  return {drawn(1, batch, heads, length, dim), drawn(2, batch, op.kv_heads, length, dim),
          drawn(3, batch, op.kv_heads, length, width), drawn(4, batch, heads, length, width)};
}

values item_of(const values& x, idx_t b) {
  values one(1, x.heads(), x.length(), x.dim());
  std::copy_n(x.data.begin() + one.size() * b, one.size(), one.data.begin());
  return one;
}

values heads_of(const values& x, idx_t begin, idx_t count) {
  values some(x.batch(), count, x.length(), x.dim());
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < count; ++h)
      for (idx_t i = 0; i < x.length(); ++i)
        for (idx_t d = 0; d < x.dim(); ++d) some(b, h, i, d) = x(b, begin + h, i, d);
  return some;
}

// Rows [begin, end) of item b become `value`.
void fill_rows(values& x, idx_t b, idx_t begin, idx_t end, element value) {
  for (idx_t h = 0; h < x.heads(); ++h)
    for (idx_t i = begin; i < end; ++i)
      for (idx_t d = 0; d < x.dim(); ++d) x(b, h, i, d) = value;
}

bool same_rows(const values& a, const values& b, idx_t end) {
  for (idx_t n = 0; n < a.batch(); ++n)
    for (idx_t h = 0; h < a.heads(); ++h)
      for (idx_t i = 0; i < end; ++i)
        for (idx_t d = 0; d < a.dim(); ++d)
          if (!(a(n, h, i, d) == b(n, h, i, d))) return false;
  return true;
}

TEST_CASE("bfloat16: any number of threads, and memory with gaps, give the same bits",
          "[bfloat16_laws][bfloat16_threads]") {
  attn::execution three(3, 0), serial;
  for (const form& op : stored_operators<element>()) {
    INFO(op.name);
    const inputs in = random_inputs(op);
    const results alone = run(op, in);
    CHECK(run(op, in, three) == alone);
    CHECK(run(op, in, serial, 7) == alone);
  }
}

TEST_CASE("bfloat16: an item alone gives what it gives in a batch", "[bfloat16_laws]") {
  for (const form& op : stored_operators<element>()) {
    INFO(op.name);
    const inputs in = random_inputs(op);
    const results all = run(op, in);
    for (idx_t b : {0, 1}) {
      const results one = run(op, {item_of(in.q, b), item_of(in.k, b), item_of(in.v, b), item_of(in.d_out, b)});
      CHECK(one == results{item_of(all.out, b), item_of(all.dq, b), item_of(all.dk, b), item_of(all.dv, b)});
    }
  }
}

TEST_CASE("bfloat16: the heads of one key head alone give what they give among others", "[bfloat16_laws]") {
  for (const form& op : stored_operators<element>()) {
    INFO(op.name);
    const inputs in = random_inputs(op);
    const results all = run(op, in);
    const idx_t group = heads / op.kv_heads;
    for (idx_t kv = 0; kv < op.kv_heads; ++kv) {
      const auto queries = [&](const values& x) { return heads_of(x, kv * group, group); };
      const auto keys = [&](const values& x) { return heads_of(x, kv, 1); };
      CHECK(run(op, {queries(in.q), keys(in.k), keys(in.v), queries(in.d_out)}) ==
            results{queries(all.out), queries(all.dq), keys(all.dk), keys(all.dv)});
    }
  }
}

TEST_CASE("bfloat16: what lies in padding changes no bit", "[bfloat16_laws]") {
  const idx_t real = 77;
  for (const form& op : stored_operators<element>()) {
    if (!op.padding) continue;
    INFO(op.name);
    inputs in = random_inputs(op);
    in.lengths = {real, length};
    const results clean = run(op, in);
    for (values* x : {&in.q, &in.k, &in.v, &in.d_out})
      fill_rows(*x, 0, real, length, std::numeric_limits<element>::quiet_NaN());
    CHECK(run(op, in) == clean);
    for (const values* x : {&clean.out, &clean.dq, &clean.dk, &clean.dv})
      for (idx_t h = 0; h < x->heads(); ++h)
        for (idx_t i = real; i < length; ++i)
          for (idx_t d = 0; d < x->dim(); ++d) REQUIRE((*x)(0, h, i, d) == element(0));
  }
}

TEST_CASE("bfloat16: what comes later changes no bit, be it not finite", "[bfloat16_laws]") {
  for (const form& op : stored_operators<element>()) {
    if (!op.causal) continue;
    INFO(op.name);
    const inputs in = random_inputs(op, 1);
    const results before = run(op, in);
    for (idx_t from : {64, 101})
      for (element later :
           {element(0.5f), std::numeric_limits<element>::infinity(), std::numeric_limits<element>::quiet_NaN()}) {
        INFO("tokens from " << from << " are " << later);
        inputs other = in;
        for (values* x : {&other.q, &other.k, &other.v}) fill_rows(*x, 0, from, length, later);
        const results after = run(op, other);
        CHECK(same_rows(after.out, before.out, from));
        CHECK(same_rows(after.dq, before.dq, from - op.reach));
      }
  }
}

// The tolerances are those of calls that round what is multiplied once more; see support/run.hpp.
TEST_CASE("bfloat16: results and gradients are those of float, but for rounding", "[bfloat16_laws]") {
  const auto& singles = stored_operators<float>();
  for (std::size_t n = 0; n < singles.size(); ++n) {
    const form& op = stored_operators<element>()[n];
    INFO(op.name);
    const inputs in = random_inputs(op);
    const results actual = run(op, in);
    tensor<float> q = cast<float>(in.q), k = cast<float>(in.k), v = cast<float>(in.v), d_out = cast<float>(in.d_out);
    tensor<float> out = d_out, dq = q, dk(k.batch(), k.heads(), length, dim), dv = v;
    attn::execution serial;
    singles[n].run({view(std::as_const(q)), view(std::as_const(k)), view(std::as_const(v)), view(std::as_const(d_out)),
                    view(out), view(dq), view(dk), view(dv), {}, serial});
    CHECK(relative_error(actual.out, out) <= made_keys_tolerance<element>::out);
    CHECK(relative_error(actual.dq, dq) <= product_gradient_tolerance<element>);
    CHECK(relative_error(actual.dk, dk) <= product_gradient_tolerance<element>);
    CHECK(relative_error(actual.dv, dv) <= product_gradient_tolerance<element>);
  }
}

// Up to four queries of a head are attended together, by a kernel of their own.
struct few_queries {
  values q, k, v, out;
  tensor<float> bias, lse;

  few_queries(idx_t queries, idx_t keys, float size)
      : q(drawn(1, 1, heads, queries, 64)), k(drawn(2, 1, 1, keys, 64)), v(drawn(3, 1, 1, keys, 32)),
        out(1, heads, queries, 32), bias(1, heads, queries, keys), lse(1, heads, queries, 1) {
    for (element& x : q.data) x = element(static_cast<float>(x) * size);
  }
  void run(bool causal) {
    compiled_full_softmax<element>::options options;
    options.causal = causal, options.bias = view(std::as_const(bias)), options.lse = row_view(lse);
    attn::execution serial;
    compiled_full_softmax<element>::call(view(std::as_const(q)), view(std::as_const(k)), view(std::as_const(v)),
                                         view(out), options, {}, serial);
  }
  // The rows of `out`, but for one.
  std::vector<element> others(idx_t h, idx_t i) const {
    std::vector<element> rows;
    for (idx_t head = 0; head < heads; ++head)
      for (idx_t row = 0; row < out.length(); ++row)
        for (idx_t d = 0; d < out.dim() && (head != h || row != i); ++d) rows.push_back(out(0, head, row, d));
    return rows;
  }
};

TEST_CASE("bfloat16: no query of few changes a bit of another's result", "[bfloat16_laws]") {
  for (idx_t keys : {31, 128, 300})
    for (idx_t queries : {1, 2, 4}) {
      CAPTURE(keys, queries);
      few_queries plain(queries, keys, 1), steep = plain, masked = plain;
      const idx_t last = queries - 1;
      for (idx_t d = 0; d < 64; ++d) steep.q(0, 1, last, d) = element(300 * static_cast<float>(steep.q(0, 1, last, d)));
      masked.bias(0, 1, last, 5) = -std::numeric_limits<float>::infinity();
      for (few_queries* x : {&plain, &steep, &masked}) x->run(true);
      CHECK(steep.others(1, last) == plain.others(1, last));
      CHECK(masked.others(1, last) == plain.others(1, last));
      CHECK(!(masked.out.data == plain.out.data));
    }
}

TEST_CASE("bfloat16: a value that one of few queries does not see may be anything to it", "[bfloat16_laws]") {
  for (idx_t keys : {31, 128}) {
    few_queries plain(4, keys, 1), poisoned = plain;
    for (few_queries* x : {&plain, &poisoned}) x->bias(0, 2, 1, 6) = -std::numeric_limits<float>::infinity();
    for (idx_t d = 0; d < 32; ++d) poisoned.v(0, 0, 6, d) = std::numeric_limits<element>::quiet_NaN();
    plain.run(false), poisoned.run(false);
    for (idx_t h = 0; h < heads; ++h)
      for (idx_t i = 0; i < 4; ++i)
        for (idx_t d = 0; d < 32; ++d)
          REQUIRE((h == 2 && i == 1 ? poisoned.out(0, h, i, d) == plain.out(0, h, i, d)
                                    : std::isnan(static_cast<float>(poisoned.out(0, h, i, d)))));
  }
}

TEST_CASE("bfloat16: scores of few queries lose no more than those of many", "[bfloat16_laws]") {
  for (float size : {1.0f, 30.0f}) {
    few_queries many(5, 300, size), few(4, 300, size);
    for (idx_t h = 0; h < heads; ++h)
      for (idx_t i = 0; i < 4; ++i)
        for (idx_t d = 0; d < 64; ++d) few.q(0, h, i, d) = many.q(0, h, i, d);
    many.run(false), few.run(false);
    for (idx_t h = 0; h < heads; ++h)
      for (idx_t i = 0; i < 4; ++i) CHECK(std::abs(few.lse(0, h, i, 0) - many.lse(0, h, i, 0)) < 1e-3f);
  }
}

}  // namespace
}  // namespace testing::bfloat16_tests
