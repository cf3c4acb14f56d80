// Laws 1 and 2 of gradients. Padding: those of an item of length n are what the unpadded sequence of length n gives,
// those of its padding are zero, and whatever lies in the padding changes no bit. Independence: a batch of heads gives
// bitwise what each key head alone gives, with the query heads that share it.
#include "laws/gradient_law.hpp"
#include "support/catch.hpp"

namespace testing::gradients_padding_tests {
namespace {

std::size_t nth(idx_t b) { return static_cast<std::size_t>(b); }

// Rows [0, n) of heads [first, first + heads) of batch item b.
template <class T>
tensor<T> part(const tensor<T>& x, idx_t b, idx_t first, idx_t heads, idx_t n) {
  if (x.extents == tensor<T>().extents) return {};
  tensor<T> some(1, heads, n, x.dim());
  for (idx_t h = 0; h < heads; ++h)
    for (idx_t i = 0; i < n; ++i)
      for (idx_t d = 0; d < x.dim(); ++d) some(0, h, i, d) = x(b, first + h, i, d);
  return some;
}

// Of what is differentiated in batch item b: query heads that share `kv_heads` key heads from the first on.
template <class T>
law_inputs<T> part(const law_inputs<T>& x, idx_t b, idx_t group, idx_t first, idx_t kv_heads, idx_t queries,
                   idx_t keys) {
  return {part(x.q, b, first * group, kv_heads * group, queries), part(x.k, b, first, kv_heads, keys),
          part(x.v, b, first, kv_heads, keys)};
}

template <class T>
void check_gradient_padding(const law_operator<T>& op, const law_shape& shape, const std::vector<idx_t>& queries,
                            const std::vector<idx_t>& keys, bool separate) {
  INFO(op.name << ", " << text(shape));
  const law_inputs<T> clean = random_inputs<T>(shape);
  const tensor<T> d_out = random_d_out<T>(shape);
  attn::execution serial;
  const auto run = [&](bool poison) {
    law_inputs<T> in = clean;
    tensor<T> d = d_out;
    law_result<T> forward = fresh_result(op, shape);
    law_call<T> call = call_of(in, forward, serial);
    if (separate)
      call.query_lengths = queries, call.key_lengths = keys;
    else
      call.lengths = keys;
    op.bind(shape)(call);
    for (idx_t b = 0; poison && b < shape.batch; ++b) {
      poison_rows(in.q, b, queries[nth(b)], shape.queries);
      poison_rows(in.k, b, keys[nth(b)], shape.keys);
      poison_rows(in.v, b, keys[nth(b)], shape.keys);
      poison_rows(d, b, queries[nth(b)], shape.queries);
      poison_rows(forward.out, b, queries[nth(b)], shape.queries);
      if (op.lse) poison_rows(forward.lse, b, queries[nth(b)], shape.queries);
    }
    law_gradients<T> g = fresh_gradients(op, shape);
    law_backward_call<T> back = call_of(in, forward, d, g, serial);
    back.lengths = call.lengths, back.query_lengths = call.query_lengths, back.key_lengths = call.key_lengths;
    back.parameters = &g.parameters;
    op.backward(shape)(back);
    return g;
  };
  const law_gradients<T> padded = run(true);
  CHECK(identical(padded, run(false)));

  for (idx_t b = 0; b < shape.batch; ++b) {
    const idx_t nq = queries[nth(b)], nk = keys[nth(b)], group = shape.heads / shape.kv_heads;
    law_shape alone = shape;
    alone.batch = 1, alone.first_batch = b, alone.queries = nq, alone.keys = nk;
    const law_gradients<T> wanted =
        differentiate(op, alone, part(clean, b, group, 0, shape.kv_heads, nq, nk), part(d_out, b, 0, shape.heads, nq));
    INFO("item " << b << " of length " << nq << "/" << nk);
    const double bound = op.error_factor * gradient_tolerance<T>::value;
    CHECK(relative_error(part(padded.q, b, 0, shape.heads, nq), wanted.q) <= bound);
    CHECK(relative_error(part(padded.k, b, 0, shape.kv_heads, nk), wanted.k) <= bound);
    CHECK(relative_error(part(padded.v, b, 0, shape.kv_heads, nk), wanted.v) <= bound);
    CHECK(zero_rows(padded.q, b, nq, shape.queries));
    CHECK(zero_rows(padded.k, b, nk, padded.k.length()));
    CHECK(zero_rows(padded.v, b, nk, padded.v.length()));
  }
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("law 1 of gradients: padding changes nothing", "[gradient_padding]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.backward || !op.padding || !op.independent) continue;
    for (law_shape shape : law_shapes({0, 1, 7, 16, 65, 130})) {
      shape = fitted(op, shape);
      shape.batch = 3;
      const std::vector<idx_t> lengths = {shape.queries / 2, shape.queries, shape.queries > 3 ? 3 : 0};
      check_gradient_padding(op, shape, lengths, lengths, false);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("law 1 of gradients: queries and keys are padded separately", "[gradient_padding]",
                        exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.backward || !op.cross || !op.padding || !op.independent) continue;
    for (law_shape shape : law_shapes({7, 33, 70})) {
      shape = fitted(op, shape);
      shape.batch = 3, shape.keys = shape.queries * 3 / 2;
      const idx_t q = shape.queries, k = shape.keys;
      check_gradient_padding(op, shape, {q, q / 2, q - 1}, {k / 3, k, k - 5},
                             true);  // fewer keys than queries, and more
    }
  }
}

TEMPLATE_LIST_TEST_CASE("law 2 of gradients: each key head stands alone", "[gradient_independence]", exact_types) {
  using T = TestType;
  for (const auto& op : operators<T>()) {
    if (!op.backward || !op.independent) continue;
    for (law_shape shape : law_shapes({0, 1, 7, 64, 65, 130})) {
      shape = fitted(op, shape);
      INFO(op.name << ", " << text(shape));
      const law_inputs<T> in = random_inputs<T>(shape);
      const tensor<T> d_out = random_d_out<T>(shape);
      const law_gradients<T> together = differentiate(op, shape, in, d_out);
      const idx_t group = shape.heads / shape.kv_heads;
      bool same = true;
      for (idx_t b = 0; b < shape.batch; ++b)
        for (idx_t kv = 0; kv < shape.kv_heads; ++kv) {
          law_shape alone = shape;
          alone.batch = alone.kv_heads = 1, alone.heads = group;
          alone.first_batch = b, alone.first_head = kv * group;
          const law_gradients<T> single = differentiate(op, alone, part(in, b, group, kv, 1, shape.queries, shape.keys),
                                                        part(d_out, b, kv * group, group, shape.queries));
          same = same && identical(single.q, part(together.q, b, kv * group, group, shape.queries)) &&
                 identical(single.k, part(together.k, b, kv, 1, shape.keys)) &&
                 identical(single.v, part(together.v, b, kv, 1, shape.keys));
        }
      CHECK(same);
    }
  }
}

}  // namespace testing::gradients_padding_tests
