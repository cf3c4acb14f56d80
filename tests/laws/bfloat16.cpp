// The laws that speak of bits, for bfloat16: other instructions multiply it, from operands packed in other ways, with code
// of their own for what is not finite. Batch items alone, padding, memory with gaps, threads, and tokens that come later,
// forward and in the backward pass.
#include <functional>

#include "support/call_kernel.hpp"
#include "support/call_long_short.hpp"
#include "support/call_low_rank.hpp"
#include "support/call_lsh.hpp"
#include "support/call_patterns.hpp"
#include "support/call_topk_blocks.hpp"
#include "support/catch.hpp"

namespace testing {
namespace {

using element = Eigen::bfloat16;
using values = tensor<element>;
constexpr index heads = 4, dim = 33, value_dim = 40, length = 150, features = 20;

struct inputs {
  values q, k, v, d_out;
  std::vector<index> lengths{};
};
struct results {
  values out, dq, dk, dv;
  bool operator==(const results&) const = default;
};
struct stored_call {
  in_view<element> q, k, v, d_out;
  out_view<element> out, dq, dk, dv;
  std::vector<index> lengths;
  attn::execution& execution;

  template <class Options>
  Options options(bool causal) const {
    Options to;
    to.lengths = lengths;
    if constexpr (requires { to.causal; }) to.causal = causal;
    return to;
  }
};
struct stored_operator {
  std::string name;
  bool causal;
  std::function<void(const stored_call&)> run;
  index kv_heads = 2;
};

values drawn(std::uint64_t seed, index batch, index count, index tokens, index width) {
  return cast<element>(random_normal(seed, batch, count, tokens, width));
}

template <template <class> class Compiled>
stored_operator softmax(const char* name, bool causal, const auto& set) {
  return {name, causal, [=](const stored_call& c) {
            using compiled = Compiled<element>;
            auto options = c.options<typename compiled::options>(causal);
            set(options);
            compiled::call(c.q, c.k, c.v, c.out, options, {}, c.execution);
            compiled::backward(c.q, c.k, c.v, c.out, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options, {}, {},
                               c.execution);
          }};
}
template <template <class> class Compiled>
stored_operator random_features(const char* name, bool causal) {
  return {name, causal, [=](const stored_call& c) {
            using compiled = Compiled<element>;
            static const values w = drawn(8, 1, 1, features, dim);
            const auto options = c.options<typename compiled::options>(causal);
            compiled::call(c.q, c.k, c.v, c.out, features_of(w), options, c.execution);
            compiled::backward(c.q, c.k, c.v, features_of(w), c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options,
                               c.execution);
          }};
}
stored_operator linear(const char* name, bool causal) {
  return {name, causal, [=](const stored_call& c) {
            using compiled = compiled_linear<element>;
            const auto options = c.options<compiled::options>(causal);
            constexpr auto feature = reference::linear_feature::elu_plus_one;
            compiled::call(c.q, c.k, c.v, c.out, options, feature, c.execution);
            compiled::backward(c.q, c.k, c.v, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options, feature,
                               c.execution);
          }};
}
stored_operator linformer() {
  return {"linformer", false, [](const stored_call& c) {
            using compiled = compiled_linformer<element>;
            static const values e = drawn(9, 1, 1, features, length);
            const auto options = c.options<compiled::options>(false);
            compiled::call(c.q, c.k, c.v, c.out, features_of(e), features_of(e), options, c.execution);
            compiled::backward(c.q, c.k, c.v, c.out, features_of(e), features_of(e), c.d_out,
                               {.q = c.dq, .k = c.dk, .v = c.dv}, options, c.execution);
          }};
}
stored_operator nystrom() {
  return {"nystrom", false, [](const stored_call& c) {
            using compiled = compiled_nystrom<element>;
            auto options = c.options<compiled::options>(false);
            options.landmarks = 16;
            compiled::call(c.q, c.k, c.v, c.out, options, c.execution);
            compiled::backward(c.q, c.k, c.v, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options, c.execution);
          }};
}
stored_operator long_short(const char* name, bool causal) {
  return {name, causal, [=](const stored_call& c) {
            using compiled = compiled_long_short<element>;
            // One head's logits serve all heads of all items, so that each may be computed alone.
            static const values logits = drawn(10, 1, 1, length, 6);
            const in_view<element> shared(logits.data.data(), {c.q.extent(0), c.q.extent(1), length, 6}, {0, 0, 6, 1});
            auto options = c.options<compiled::options>(causal);
            options.left = 19, options.right = causal ? 0 : 11, options.segment = causal ? 32 : 0;
            compiled::call(c.q, c.k, c.v, c.out, shared, options, c.execution);
            compiled::backward(c.q, c.k, c.v, c.out, shared, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options,
                               c.execution);
          }};
}
stored_operator lsh() {
  // Tokens that come later take places in the sorted order, which moves what earlier ones see.
  return {"lsh", false,
          [](const stored_call& c) {
            using compiled = compiled_lsh<element>;
            auto options = c.options<compiled::options>(false);
            options.chunk = 16, options.buckets = 8;
            compiled::call(c.q, c.v, c.out, options, {}, c.execution);
            compiled::backward(c.q, c.v, c.out, c.d_out, {.q = c.dq, .v = c.dv}, options, {}, {}, c.execution);
          },
          heads};
}

const std::vector<stored_operator>& stored_operators() {
  const auto nothing = [](auto&) {};
  static const std::vector<stored_operator> all = {
      softmax<compiled_full_softmax>("full_softmax", false, nothing),
      softmax<compiled_full_softmax>("full_softmax causal", true, nothing),
      softmax<compiled_sliding_window>("sliding_window causal", true, [](auto& o) { o.left = 21; }),
      softmax<compiled_block>("block", false, [](auto& o) { o.size = 20; }),
      softmax<compiled_strided>("strided causal", true, [](auto& o) { o.stride = 9; }),
      softmax<compiled_bigbird>("bigbird causal", true, [](auto& o) { o.size = 16; }),
      softmax<compiled_topk_blocks>("topk_blocks", true, [](auto& o) { o.block = 24; }),
      lsh(),
      linformer(),
      long_short("long_short", false),
      long_short("long_short causal", true),
      nystrom(),
      linear("linear", false),
      linear("linear causal", true),
      random_features<compiled_performer>("performer", false),
      random_features<compiled_performer>("performer causal", true),
      random_features<compiled_rfa>("rfa", false),
      random_features<compiled_rfa>("rfa causal", true)};
  return all;
}

// One call. `gap`: rows lie so many elements further apart, with NaN between them.
results run(const stored_operator& op, const inputs& in, attn::execution& exec, index gap = 0) {
  const element nan = std::numeric_limits<element>::quiet_NaN();
  struct memory {
    std::vector<element> numbers;
    std::array<index, 4> extents{}, strides{};
    out_view<element> view() { return {numbers.data(), extents, strides}; }
  };
  const auto place = [&](const values& x) {
    const index row = x.dim() + gap, head = x.length() * row;
    memory m{std::vector<element>(static_cast<std::size_t>(x.batch() * x.heads() * head), nan),
             x.extents,
             {x.heads() * head, head, row, 1}};
    for (index b = 0; b < x.batch(); ++b)
      for (index h = 0; h < x.heads(); ++h)
        for (index i = 0; i < x.length(); ++i)
          for (index d = 0; d < x.dim(); ++d) m.view()(b, h, i, d) = x(b, h, i, d);
    return m;
  };
  const auto taken = [&](memory& m) {
    values x(m.extents[0], m.extents[1], m.extents[2], m.extents[3]);
    for (index b = 0; b < x.batch(); ++b)
      for (index h = 0; h < x.heads(); ++h)
        for (index i = 0; i < x.length(); ++i) {
          for (index d = 0; d < x.dim(); ++d) x(b, h, i, d) = m.view()(b, h, i, d);
          for (index d = x.dim(); d < x.dim() + gap; ++d)
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
results run(const stored_operator& op, const inputs& in) {
  attn::execution serial;
  return run(op, in, serial);
}

inputs random_inputs(const stored_operator& op, index batch = 2) {
  return {drawn(1, batch, heads, length, dim), drawn(2, batch, op.kv_heads, length, dim),
          drawn(3, batch, op.kv_heads, length, value_dim), drawn(4, batch, heads, length, value_dim)};
}

values item_of(const values& x, index b) {
  values one(1, x.heads(), x.length(), x.dim());
  std::copy_n(x.data.begin() + one.size() * b, one.size(), one.data.begin());
  return one;
}

values heads_of(const values& x, index begin, index count) {
  values some(x.batch(), count, x.length(), x.dim());
  for (index b = 0; b < x.batch(); ++b)
    for (index h = 0; h < count; ++h)
      for (index i = 0; i < x.length(); ++i)
        for (index d = 0; d < x.dim(); ++d) some(b, h, i, d) = x(b, begin + h, i, d);
  return some;
}

// Rows [begin, end) of item b become `value`.
void fill_rows(values& x, index b, index begin, index end, element value) {
  for (index h = 0; h < x.heads(); ++h)
    for (index i = begin; i < end; ++i)
      for (index d = 0; d < x.dim(); ++d) x(b, h, i, d) = value;
}

bool same_rows(const values& a, const values& b, index end) {
  for (index n = 0; n < a.batch(); ++n)
    for (index h = 0; h < a.heads(); ++h)
      for (index i = 0; i < end; ++i)
        for (index d = 0; d < a.dim(); ++d)
          if (!(a(n, h, i, d) == b(n, h, i, d))) return false;
  return true;
}

TEST_CASE("bfloat16: any number of threads, and memory with gaps, give the same bits", "[bfloat16_laws]") {
  attn::execution three(3, 0), serial;
  for (const stored_operator& op : stored_operators()) {
    INFO(op.name);
    const inputs in = random_inputs(op);
    const results alone = run(op, in);
    CHECK(run(op, in, three) == alone);
    CHECK(run(op, in, serial, 7) == alone);
  }
}

TEST_CASE("bfloat16: an item alone gives what it gives in a batch", "[bfloat16_laws]") {
  for (const stored_operator& op : stored_operators()) {
    INFO(op.name);
    const inputs in = random_inputs(op);
    const results all = run(op, in);
    for (index b : {0, 1}) {
      const results one = run(op, {item_of(in.q, b), item_of(in.k, b), item_of(in.v, b), item_of(in.d_out, b)});
      CHECK(one == results{item_of(all.out, b), item_of(all.dq, b), item_of(all.dk, b), item_of(all.dv, b)});
    }
  }
}

TEST_CASE("bfloat16: the heads of one key head alone give what they give among others", "[bfloat16_laws]") {
  for (const stored_operator& op : stored_operators()) {
    INFO(op.name);
    const inputs in = random_inputs(op);
    const results all = run(op, in);
    const index group = heads / op.kv_heads;
    for (index kv = 0; kv < op.kv_heads; ++kv) {
      const auto queries = [&](const values& x) { return heads_of(x, kv * group, group); };
      const auto keys = [&](const values& x) { return heads_of(x, kv, 1); };
      CHECK(run(op, {queries(in.q), keys(in.k), keys(in.v), queries(in.d_out)}) ==
            results{queries(all.out), queries(all.dq), keys(all.dk), keys(all.dv)});
    }
  }
}

TEST_CASE("bfloat16: what lies in padding changes no bit", "[bfloat16_laws]") {
  const index real = 77;
  for (const stored_operator& op : stored_operators()) {
    INFO(op.name);
    inputs in = random_inputs(op);
    in.lengths = {real, length};
    const results clean = run(op, in);
    for (values* x : {&in.q, &in.k, &in.v, &in.d_out})
      fill_rows(*x, 0, real, length, std::numeric_limits<element>::quiet_NaN());
    CHECK(run(op, in) == clean);
    for (const values* x : {&clean.out, &clean.dq, &clean.dk, &clean.dv})
      for (index h = 0; h < x->heads(); ++h)
        for (index i = real; i < length; ++i)
          for (index d = 0; d < x->dim(); ++d) REQUIRE((*x)(0, h, i, d) == element(0));
  }
}

TEST_CASE("bfloat16: what comes later changes no bit, be it not finite", "[bfloat16_laws]") {
  for (const stored_operator& op : stored_operators()) {
    if (!op.causal) continue;
    INFO(op.name);
    const inputs in = random_inputs(op, 1);
    const results before = run(op, in);
    for (index from : {64, 101})
      for (element later :
           {element(0.5f), std::numeric_limits<element>::infinity(), std::numeric_limits<element>::quiet_NaN()}) {
        INFO("tokens from " << from << " are " << later);
        inputs other = in;
        for (values* x : {&other.q, &other.k, &other.v}) fill_rows(*x, 0, from, length, later);
        const results after = run(op, other);
        CHECK(same_rows(after.out, before.out, from));
        CHECK(same_rows(after.dq, before.dq, from));
      }
  }
}

// Up to four queries of a head are attended together, by a kernel of their own.
struct few_queries {
  values q, k, v, out;
  tensor<float> bias, lse;

  few_queries(index queries, index keys, float size)
      : q(drawn(1, 1, heads, queries, 64)), k(drawn(2, 1, 1, keys, 64)), v(drawn(3, 1, 1, keys, 32)),
        out(1, heads, queries, 32), bias(1, heads, queries, keys), lse(1, heads, queries, 1) {
    for (element& x : q.data) x = element(static_cast<float>(x) * size);
  }
  void run(bool causal) {
    compiled_full_softmax<element>::options options;
    options.causal = causal, options.bias = view(std::as_const(bias)), options.lse = row_view(lse);
    attn::execution serial;
    compiled_full_softmax<element>::call(view(std::as_const(q)), view(std::as_const(k)), view(std::as_const(v)), view(out),
                                         options, {}, serial);
  }
  // The rows of `out`, but for one.
  std::vector<element> others(index h, index i) const {
    std::vector<element> rows;
    for (index head = 0; head < heads; ++head)
      for (index row = 0; row < out.length(); ++row)
        for (index d = 0; d < out.dim() && (head != h || row != i); ++d) rows.push_back(out(0, head, row, d));
    return rows;
  }
};

TEST_CASE("bfloat16: no query of few changes a bit of another's result", "[bfloat16_laws]") {
  for (index keys : {31, 128, 300})
    for (index queries : {1, 2, 4}) {
      CAPTURE(keys, queries);
      few_queries plain(queries, keys, 1), steep = plain, masked = plain;
      const index last = queries - 1;
      for (index d = 0; d < 64; ++d) steep.q(0, 1, last, d) = element(300 * static_cast<float>(steep.q(0, 1, last, d)));
      masked.bias(0, 1, last, 5) = -std::numeric_limits<float>::infinity();
      for (few_queries* x : {&plain, &steep, &masked}) x->run(true);
      CHECK(steep.others(1, last) == plain.others(1, last));
      CHECK(masked.others(1, last) == plain.others(1, last));
      CHECK(!(masked.out.data == plain.out.data));
    }
}

TEST_CASE("bfloat16: a value that one of few queries does not see may be anything to it", "[bfloat16_laws]") {
  for (index keys : {31, 128}) {
    few_queries plain(4, keys, 1), poisoned = plain;
    for (few_queries* x : {&plain, &poisoned}) x->bias(0, 2, 1, 6) = -std::numeric_limits<float>::infinity();
    for (index d = 0; d < 32; ++d) poisoned.v(0, 0, 6, d) = std::numeric_limits<element>::quiet_NaN();
    plain.run(false), poisoned.run(false);
    for (index h = 0; h < heads; ++h)
      for (index i = 0; i < 4; ++i)
        for (index d = 0; d < 32; ++d)
          REQUIRE((h == 2 && i == 1 ? poisoned.out(0, h, i, d) == plain.out(0, h, i, d)
                                    : std::isnan(static_cast<float>(poisoned.out(0, h, i, d)))));
  }
}

TEST_CASE("bfloat16: scores of few queries lose no more than those of many", "[bfloat16_laws]") {
  for (float size : {1.0f, 30.0f}) {
    few_queries many(5, 300, size), few(4, 300, size);
    for (index h = 0; h < heads; ++h)
      for (index i = 0; i < 4; ++i)
        for (index d = 0; d < 64; ++d) few.q(0, h, i, d) = many.q(0, h, i, d);
    many.run(false), few.run(false);
    for (index h = 0; h < heads; ++h)
      for (index i = 0; i < 4; ++i) CHECK(std::abs(few.lse(0, h, i, 0) - many.lse(0, h, i, 0)) < 1e-3f);
  }
}

}  // namespace
}  // namespace testing
