// Law 12. Long rows: over 524288 keys, one of which has .99 of the weight, the others lose none of theirs.
#include "laws/gradient_law.hpp"
#include "support/catch.hpp"

namespace testing::long_rows_tests {
namespace {

constexpr idx_t length = 524288;
// Relative errors; of dk to its largest number. Terms of dq and dk cancel a hundredfold, the tolerance is that of the
// result. The sums of the kernels and of AFT take fewer keys at a time.
constexpr double most_of_softmax = 2e-5, most_of_sums = 1e-5;

// Keys 1.5 sin j; the first has 99 times the weight of all others: e^k, or 1 + k where features are linear in k.
struct long_keys {
  tensor<float> k{1, 1, length, 1}, v{1, 1, length, 1};
  double sink = 0, others = 0;  // sums of e^k

  explicit long_keys(bool linear) {
    double rest = 0;
    for (idx_t j = 1; j < length; ++j) {
      const double wave = std::sin(static_cast<double>(j));
      k(0, 0, j, 0) = static_cast<float>(linear ? 1 + wave : 1.5 * wave);
      v(0, 0, j, 0) = -1;
      rest += weight(k(0, 0, j, 0), linear);
    }
    k(0, 0, 0, 0) = static_cast<float>(linear ? 99 * rest - 1 : std::log(99 * rest));
    v(0, 0, 0, 0) = 1;
    sink = weight(k(0, 0, 0, 0), linear), others = rest;
  }
  static double weight(float k, bool linear) {
    const double x = static_cast<double>(k);
    return linear ? 1 + x : std::exp(x);
  }
  double mean() const { return (sink - others) / (sink + others); }
};

// The largest error of the last rows, the earlier of which may see fewer keys.
double worst_error(const tensor<float>& x, double right) {
  double worst = 0;
  for (idx_t i = x.length() - std::min<idx_t>(8, x.length()); i < x.length(); ++i) {
    const double error = std::abs(static_cast<double>(x(0, 0, i, 0)) - right);
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

void check_gradients(const law_long_rows<float>& form, const law_shape& s, const long_keys& keys,
                     const tensor<float>& q, law_result<float>& r) {
  attn::execution serial;
  tensor<float> d_out(1, 1, s.queries, 1);
  for (float& x : d_out.data) x = 1;
  tensor<float> dq(1, 1, s.queries, 1), dk = keys.k, dv = keys.v;
  form.backward(s)({.q = view(q), .k = view(keys.k), .v = view(keys.v), .out = view(std::as_const(r.out)),
                    .d_out = view(d_out), .lse = {}, .dq = view(dq), .dk = view(dk), .dv = view(dv), .lengths = {},
                    .execution = &serial});
  std::vector<double> right_k(static_cast<std::size_t>(length)), right_v = right_k;
  // Rows that see the same keys have the same gradients.
  const idx_t different = form.causal ? s.queries : 1;
  for (idx_t i = 0; i < different; ++i) {
    const idx_t seen = length - different + i + 1;
    const double n = static_cast<double>(s.queries / different);
    double others = keys.others, right = 0;
    for (idx_t j = seen; j < length; ++j) others -= keys.weight(keys.k(0, 0, j, 0), false);
    const double all = keys.sink + others, mean = (keys.sink - others) / all;
    for (idx_t j = 0; j < seen; ++j) {
      const double k = static_cast<double>(keys.k(0, 0, j, 0)), weight = std::exp(k) / all;
      const double d = weight * (static_cast<double>(keys.v(0, 0, j, 0)) - mean);
      right += d * k, right_k[static_cast<std::size_t>(j)] += n * d, right_v[static_cast<std::size_t>(j)] += n * weight;
    }
    const idx_t last = form.causal ? i : s.queries - 1;
    for (idx_t row = form.causal ? i : std::max<idx_t>(0, last - 7); row <= last; ++row)
      CHECK(std::abs(static_cast<double>(dq(0, 0, row, 0)) / right - 1) <= most_of_softmax);
  }
  double of_keys = 0, key_size = 0, of_others = 0, right_others = 0;
  for (idx_t j = 0; j < length; ++j) {
    const double right = right_k[static_cast<std::size_t>(j)];
    const double error = std::abs(static_cast<double>(dk(0, 0, j, 0)) - right);
    if (!(error <= of_keys)) of_keys = error;
    key_size = std::max(key_size, std::abs(right));
    if (j > 0) of_others += static_cast<double>(dv(0, 0, j, 0)), right_others += right_v[static_cast<std::size_t>(j)];
  }
  CHECK(of_keys <= most_of_softmax * key_size);
  CHECK(std::abs(static_cast<double>(dv(0, 0, 0, 0)) / right_v[0] - 1) <= most_of_softmax);
  CHECK(std::abs(of_others / right_others - 1) <= most_of_softmax);
}

}  // namespace

TEST_CASE("law 12: in long rows one large weight swallows no small ones", "[long_rows]") {
  const long_keys exponential(false), linear(true);
  for (const auto& op : operators<float>())
    for (const law_long_rows<float>& form : op.long_rows) {
      const long_keys& keys = form.reference ? linear : exponential;
      std::vector<idx_t> counts{op.square ? length : 8};
      if (op.of == "full_softmax") counts.insert(counts.end(), {1, 2, 3, 4});  // by another kernel
      for (idx_t queries : counts) {
        law_shape s{.batch = 1, .heads = 1, .kv_heads = 1, .queries = 1, .keys = length, .dim = 1, .value_dim = 1};
        s.queries = queries;
        INFO(op.of << ": " << op.name << " " << form.name << ", " << queries << " queries");
        tensor<float> q(1, 1, queries, 1);
        for (float& x : q.data) x = 1;
        law_result<float> r = fresh_result(op, s);
        attn::execution serial;
        form.bind(s)(call_of({q, keys.k, keys.v}, r, serial));
        CHECK(worst_error(r.out, keys.mean()) <= (op.lse ? most_of_softmax : most_of_sums));
        if (op.lse) CHECK(worst_error(r.lse, std::log(keys.sink + keys.others)) <= most_of_softmax);
        if (form.backward) check_gradients(form, s, keys, q, r);
      }
    }
}

// The sums of a key's gradient over as many queries, all of weight 1/2 but the first, whose d_out is 99 times that of
// the others together.
TEST_CASE("law 12: gradients of keys are such sums too", "[long_rows]") {
  for (const auto& op : operators<float>()) {
    if (op.of != "full_softmax") continue;  // of others only queries at positions of keys see them
    for (const law_long_rows<float>& form : op.long_rows) {
      law_shape s{.batch = 1, .heads = 1, .kv_heads = 1, .queries = length, .keys = 2, .dim = 1, .value_dim = 1};
      INFO(op.of << ": " << op.name);
      const tensor<float> q(1, 1, length, 1), k(1, 1, 2, 1);
      tensor<float> v(1, 1, 2, 1), d_out(1, 1, length, 1), dv = v, out = q;
      double others = 0;
      for (idx_t i = 1; i < length; ++i) {
        d_out(0, 0, i, 0) = static_cast<float>(1.5 + std::sin(static_cast<double>(i)));
        others += static_cast<double>(d_out(0, 0, i, 0));
      }
      d_out(0, 0, 0, 0) = static_cast<float>(99 * others);
      attn::execution serial;
      form.backward(s)({.q = view(q), .k = view(k), .v = view(v), .out = view(std::as_const(out)),
                        .d_out = view(d_out), .lse = {}, .dq = {}, .dk = {}, .dv = view(dv), .lengths = {},
                        .execution = &serial});
      const double right = (static_cast<double>(d_out(0, 0, 0, 0)) + others) / 2;
      for (float x : dv.data) CHECK(std::abs(static_cast<double>(x) / right - 1) <= most_of_softmax);
    }
  }
}

}  // namespace testing::long_rows_tests
