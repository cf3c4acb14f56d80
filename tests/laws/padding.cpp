// Law 1. Padding: item b with length n gives what the unpadded sequence of length n gives; rows beyond n are
// zero. Whatever lies in the padding changes nothing.
#include "laws/law.hpp"
#include "support/catch.hpp"

namespace testing::padding_tests {
namespace {

std::size_t at(idx_t b) { return static_cast<std::size_t>(b); }

// Rows [0, n) of batch item b.
template <class T>
tensor<T> item(const tensor<T>& x, idx_t b, idx_t n) {
  tensor<T> part(1, x.heads(), n, x.dim());
  for (idx_t h = 0; h < x.heads(); ++h)
    for (idx_t i = 0; i < n; ++i)
      for (idx_t d = 0; d < x.dim(); ++d) part(0, h, i, d) = x(b, h, i, d);
  return part;
}

template <class T>
bool blank(const law_result<T>& r, idx_t b, idx_t begin) {
  for (idx_t h = 0; h < r.out.heads(); ++h)
    for (idx_t i = begin; i < r.out.length(); ++i) {
      for (idx_t d = 0; d < r.out.dim(); ++d)
        if (r.out(b, h, i, d) != 0) return false;
      if (!r.lse.empty() && r.lse(b, h, i, 0) != -std::numeric_limits<T>::infinity()) return false;
    }
  return true;
}

// `separate`: queries and keys have different lengths.
template <class T>
void check_padding(const law_operator<T>& op, const law_shape& shape, const std::vector<idx_t>& queries,
                   const std::vector<idx_t>& keys, bool separate) {
  INFO(op.name << ", " << text(shape));
  const law_inputs<T> clean = random_inputs<T>(shape);
  law_inputs<T> in = clean;
  for (idx_t b = 0; b < shape.batch; ++b) {
    poison_rows(in.q, b, queries[at(b)], shape.queries);
    poison_rows(in.k, b, keys[at(b)], shape.keys);
    poison_rows(in.v, b, keys[at(b)], shape.keys);
  }
  law_result<T> padded = fresh_result(op, shape);
  attn::execution serial;
  law_call<T> call = call_of(in, padded, serial);
  if (separate)
    call.query_lengths = queries, call.key_lengths = keys;
  else
    call.lengths = keys;
  op.bind(shape)(call);

  for (idx_t b = 0; b < shape.batch; ++b) {
    const idx_t nq = queries[at(b)], nk = keys[at(b)];
    law_shape alone = shape;
    alone.batch = 1, alone.first_batch = b, alone.queries = nq, alone.keys = nk;
    const law_result<T> wanted = attend(op, alone, {item(clean.q, b, nq), item(clean.k, b, nk), item(clean.v, b, nk)});
    INFO("item " << b << " of length " << nq << "/" << nk);
    CHECK(relative_error(item(padded.out, b, nq), wanted.out) <= op.error_factor * tolerance<T>::out);
    if (op.lse) CHECK(relative_error(item(padded.lse, b, nq), wanted.lse) <= op.error_factor * tolerance<T>::lse);
    CHECK(blank(padded, b, nq));
  }
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("law 1: padding changes nothing", "[padding]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.padding || !op.independent) continue;
    for (law_shape shape : law_shapes()) {
      shape = fitted(op, shape);
      shape.batch = 3;
      const std::vector<idx_t> lengths = {shape.queries / 2, shape.queries, shape.queries > 3 ? 3 : 0};
      check_padding(op, shape, lengths, lengths, false);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("law 1: queries and keys are padded separately", "[padding]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.cross || !op.padding || !op.independent) continue;
    for (law_shape shape : law_shapes({7, 20, 33, 70})) {
      shape = fitted(op, shape);
      shape.batch = 3, shape.keys = shape.queries * 3 / 2;
      const idx_t q = shape.queries, k = shape.keys;
      check_padding(op, shape, {q, q / 2, q - 1}, {k / 3, k, k - 5}, true);  // fewer keys than queries, and more
    }
  }
}

}  // namespace testing::padding_tests
