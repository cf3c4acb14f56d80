#pragma once
// The laws every operator obeys, each a generic test over the table operators(). An operator joins with the file
// operators/NAME.cpp: how it is called, what it can do, and its own relatives (streaming form, limits).
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "reference/softmax.hpp"
#include "support/call.hpp"
#include "support/measure.hpp"
#include "support/pairwise.hpp"
#include "support/random.hpp"
#include "support/run.hpp"

namespace testing {

// What a law calls an operator with. `first_batch` and `first_head` say where these items stand in a larger
// batch, for parameters that differ per item or head.
struct law_shape {
  idx_t batch = 2, heads = 4, kv_heads = 2, queries = 0, keys = 0, dim = 16, value_dim = 16;
  idx_t first_batch = 0, first_head = 0;
};

template <class T>
struct law_call {
  in_view<T> q, k, v;
  out_view<T> out;
  attn::tensor_view<T, 3> lse;  // null if the operator has none, or nobody asks
  std::vector<idx_t> lengths;   // none, or one per batch item
  attn::execution* execution;
  std::vector<idx_t> query_lengths{}, key_lengths{};  // instead of lengths

  void set_lengths(auto& options) const {
    options.lengths = lengths;
    if constexpr (requires { options.key_lengths; })
      options.query_lengths = query_lengths, options.key_lengths = key_lengths;
  }
};

// An operator with its parameters for one shape. Making it may allocate, calling it may not.
template <class T>
using bound = std::function<void(const law_call<T>&)>;
template <class T>
using binder = std::function<bound<T>(const law_shape&)>;

// The same of a backward pass: what the forward call was given and what it wrote, and where gradients go. Those of what
// the operator does not read (k where queries are keys) are null.
template <class T>
struct law_backward_call {
  in_view<T> q, k, v, out, d_out;
  attn::tensor_view<T, 3> lse;
  out_view<T> dq, dk, dv;
  std::vector<idx_t> lengths;
  attn::execution* execution;
  std::vector<idx_t> query_lengths{}, key_lengths{};
  std::vector<T>* parameters = nullptr;  // if not null, gets the gradients of the operator's parameters

  void set_lengths(auto& options) const {
    options.lengths = lengths;
    if constexpr (requires { options.key_lengths; })
      options.query_lengths = query_lengths, options.key_lengths = key_lengths;
  }
  void give(const auto&... gradients) const {
    if (parameters) (parameters->insert(parameters->end(), gradients.begin(), gradients.end()), ...);
  }
};
template <class T>
using backward_binder = std::function<std::function<void(const law_backward_call<T>&)>(const law_shape&)>;

// Law 0: the naive reference in double, with the operator's parameters as T holds them. Where an operator has no lse,
// the result has none.
struct law_reference_call {
  tensor<double> q, k, v;
  std::vector<idx_t> lengths{}, query_lengths{}, key_lengths{};
  // For gradients of parameters: what is added to them, in the order in which the entry gives their gradients.
  std::vector<double> moves{};
  mutable std::size_t next_move = 0;
  // Where features have both signs: becomes the size of the terms that each result is made of, which cancel.
  tensor<double>* terms = nullptr;

  void set_lengths(auto& options) const {
    options.lengths = lengths;
    if constexpr (requires { options.key_lengths; })
      options.query_lengths = query_lengths, options.key_lengths = key_lengths;
  }
  template <class T>
  std::vector<double> parameter(const std::vector<T>& list) const {
    std::vector<double> x = cast<double>(list);
    for (std::size_t n = 0; n < x.size() && !moves.empty(); ++n) x[n] += moves.at(next_move++);
    return x;
  }
  template <class T>
  tensor<double> parameter(const tensor<T>& given) const {
    tensor<double> x;
    x.extents = given.extents, x.data = parameter(given.data);
    return x;
  }
};
using reference_binder = std::function<std::function<reference::result(const law_reference_call&)>(const law_shape&)>;

// Law 8: an operator that becomes another one at a limit.
template <class T>
struct law_limit {
  std::string name;
  binder<T> at_limit, equals;
  bool to_the_bit = false;
  backward_binder<T> backward_at_limit{}, backward_equals{};  // of those equal to the bit
};

// Law 12: a form whose queries see every key, with weights e^(q k) for dim 1; other weights have a reference.
template <class T>
struct law_long_rows {
  std::string name;
  binder<T> bind;
  backward_binder<T> backward{};
  reference_binder reference{};
  bool causal = false;  // row i sees the keys up to its position
};

template <class T>
struct law_operator {
  std::string name;
  binder<T> bind;
  bool causal = false;   // law 5: row i does not depend on what comes after its position
  bool averages = true;  // law 7: weights sum to 1
  bool grouped = true;   // fewer key heads than query heads
  bool cross = true;     // as many keys as one likes
  bool lse = true;
  bool square = false;      // q, k and v have one dim, and as many keys as queries
  bool padding = true;      // law 1: a shorter sequence is one of the same kind
  bool independent = true;  // laws 1, 2, 10: no item or head depends on others
  bool bounded = true;      // law 9: large inputs give results that are finite
  bool positive = true;     // law 9: weights are not negative, so that a mean lies between its values
  bool tied = false;        // queries are keys: k is not read
  double error_factor = 1;  // of the tolerance, where an operator loses more than a softmax: the entry says why
  // Laws 9, 10: does row i of item b and head h see row j of k and v? Empty: it is not known, and a NaN may go anywhere
  // in its head.
  std::function<bool(const law_shape&, idx_t b, idx_t h, idx_t i, idx_t j)> sees;
  reference_binder reference{};  // law 0
  binder<T> stream{};  // law 6: a fresh state; each call feeds the next tokens
  std::vector<law_limit<T>> limits{};
  std::vector<law_long_rows<T>> long_rows{};  // law 12
  backward_binder<T> backward{};  // none: it has no backward pass yet
  bool reads_queries = true;      // has q a gradient that is not 0?
  bool reads_values = true;       // has v a gradient?
  idx_t reach = 0;                // law 10 of gradients: how many rows after its own a query's gradient may depend on
  bool queries_mix = false;       // law 10 of gradients: is a row of out made of other queries too?
  // Law 13: does it obey it, in its streaming form and backward too? Can some of its queries be asked for alone, none of
  // its parameters being by their number?
  bool invariant = false, invariant_stream = false, invariant_backward = false, queries_alone = false;
  std::string of{};               // the operator it is a form of; set by law_entries
  // Why no entry of the operator has a part in a law: {"stream", "there is no step"} (census.cpp).
  std::map<std::string, std::string> without{};
};

// Law 8, to the bit and with gradients.
template <class T>
law_limit<T> same_form(std::string name, const law_operator<T>& at_limit, const law_operator<T>& equals) {
  return {std::move(name), at_limit.bind, equals.bind, true, at_limit.backward, equals.backward};
}

// The table: each file operators/NAME.cpp registers its operator's entries by one object of this type,
//   const law_entries entries("linear", [](auto& all) { add_linear(all); });
// where `all` is a vector of law_operator<float> or law_operator<double>.
class law_entries {
 public:
  template <class Add>
  law_entries(std::string name, Add add) : name_(std::move(name)), single_(add) {
#if !defined(ATTN_TEST_FEW_TYPES)
    double_ = add;
#endif
    table().push_back(this);
  }
  law_entries(const law_entries&) = delete;

  static std::vector<const law_entries*>& table() {
    static std::vector<const law_entries*> all;
    return all;
  }
  const std::string& name() const { return name_; }
  template <class T>
  void add_to(std::vector<law_operator<T>>& all) const {
    const std::size_t begin = all.size();
    if constexpr (std::is_same_v<T, float>)
      single_(all);
    else
      double_(all);
    for (std::size_t n = begin; n < all.size(); ++n) all[n].of = name_;
  }

 private:
  std::string name_;
  std::function<void(std::vector<law_operator<float>>&)> single_;
  std::function<void(std::vector<law_operator<double>>&)> double_;
};

template <class T>
const std::vector<law_operator<T>>& operators() {
  static const auto table = [] {
    std::vector<law_operator<T>> all;
    for (const law_entries* entries : law_entries::table()) entries->add_to(all);
    return all;
  }();
  return table;
}

// How threads share a call, where a layout is read from and what a NaN reaches is the same code in double as in float:
// all ways in float, by turns in double.
template <class T>
inline constexpr bool by_turns = few_shapes || std::is_same_v<T, double>;

// Every length meets a pair of dims, and eight lengths all dims of keys and of values; lengths that cost little meet
// another pair. For few operators, which qemu may run, no length exceeds a block of keys.
inline std::vector<law_shape> law_shapes(std::vector<idx_t> lengths = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}) {
  constexpr idx_t dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
#if defined(ATTN_TEST_FLOAT_ALONE)
  std::erase_if(lengths, [](idx_t length) { return length > 65; });
#endif
  std::vector<law_shape> shapes;
  for (std::size_t n = 0; n < lengths.size(); ++n)
    for (std::size_t step : {0u, 4u}) {
      if ((few_shapes || lengths[n] > 65) && step != 4 * (n % 2)) continue;
      law_shape shape{.queries = lengths[n], .keys = lengths[n]};
      shape.dim = dims[(3 * n + step) % 8], shape.value_dim = dims[(5 * n + step) % 8];
      shapes.push_back(shape);
    }
  return shapes;
}

inline std::string text(const law_shape& s) {
  const auto heads = std::to_string(s.heads) + "/" + std::to_string(s.kv_heads);
  return "batch " + std::to_string(s.batch) + ", heads " + heads + ", length " + std::to_string(s.queries) + "/" +
         std::to_string(s.keys) + ", dim " + std::to_string(s.dim) + "/" + std::to_string(s.value_dim);
}

// The shape as this operator takes it.
template <class T>
law_shape fitted(const law_operator<T>& op, law_shape shape) {
  if (!op.grouped) shape.kv_heads = shape.heads;
  if (op.square) shape.value_dim = shape.dim, shape.keys = shape.queries;
  return shape;
}

template <class T>
struct law_inputs {
  tensor<T> q, k, v;
  bool operator==(const law_inputs&) const = default;
};

// Drawn once for all operators: drawing takes as long as a call. For one thread.
template <class T>
law_inputs<T> random_inputs(const law_shape& s, std::uint64_t seed = 1) {
  static std::map<std::array<std::uint64_t, 5>, tensor<T>> drawn;
  const auto draw = [](std::uint64_t of_seed, auto... extents) -> const tensor<T>& {
    auto& x = drawn[{of_seed, static_cast<std::uint64_t>(extents)...}];
    if (x.empty()) x = cast<T>(random_normal(of_seed, extents...));
    return x;
  };
  return {draw(seed, s.batch, s.heads, s.queries, s.dim), draw(seed + 100, s.batch, s.kv_heads, s.keys, s.dim),
          draw(seed + 200, s.batch, s.kv_heads, s.keys, s.value_dim)};
}

// Every product q·k / √D is ±1e4, or 0 where a key is 0.
template <class T>
law_inputs<T> extreme_inputs(const law_shape& s) {
  law_inputs<T> in = random_inputs<T>(s);
  const double size = std::sqrt(1e4 / std::sqrt(static_cast<double>(s.dim)));
  random_source random(77);
  for (auto* x : {&in.q, &in.k})
    for (idx_t b = 0; b < x->batch(); ++b)
      for (idx_t h = 0; h < x->heads(); ++h)
        for (idx_t i = 0; i < x->length(); ++i) {
          const double sign = x == &in.k && random.below(5) == 0 ? 0 : random.below(2) ? 1 : -1;
          for (idx_t d = 0; d < s.dim; ++d) (*x)(b, h, i, d) = static_cast<T>(sign * size);
        }
  return in;
}

template <class T>
struct law_result {
  tensor<T> out, lse;
};

template <class T>
struct same_bits {
  bool operator()(const tensor<T>& a, const tensor<T>& b) const {
    return a.extents == b.extents &&
           (a.empty() || std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(T)) == 0);
  }
};
template <class T>
bool identical(const tensor<T>& a, const tensor<T>& b) {
  return same_bits<T>{}(a, b);
}
template <class T>
bool identical(const law_result<T>& a, const law_result<T>& b) {
  return identical(a.out, b.out) && identical(a.lse, b.lse);
}
template <class T>
bool close(const law_operator<T>& op, const law_result<T>& a, const law_result<T>& b) {
  return relative_error(a.out, b.out) <= op.error_factor * tolerance<T>::out &&
         relative_error(a.lse, b.lse) <= op.error_factor * tolerance<T>::lse;
}

// Outputs that start as rubbish: a row that is not written shows.
template <class T>
law_result<T> fresh_result(const law_operator<T>& op, const law_shape& s) {
  law_result<T> r{tensor<T>(s.batch, s.heads, s.queries, s.value_dim, T(7)), {}};
  if (op.lse) r.lse = tensor<T>(s.batch, s.heads, s.queries, 1, T(7));
  return r;
}

template <class T>
law_call<T> call_of(const law_inputs<T>& in, law_result<T>& r, attn::execution& execution,
                    std::vector<idx_t> lengths = {}) {
  law_call<T> call{view(in.q), view(in.k), view(in.v), view(r.out), {}, std::move(lengths), &execution};
  if (!r.lse.extents[3]) return call;
  call.lse = row_view(r.lse);
  return call;
}

template <class T>
law_result<T> attend(const law_operator<T>& op, const law_shape& s, const law_inputs<T>& in, attn::execution& execution,
                     std::vector<idx_t> lengths = {}) {
  law_result<T> r = fresh_result(op, s);
  op.bind(s)(call_of(in, r, execution, std::move(lengths)));
  return r;
}
template <class T>
law_result<T> attend(const law_operator<T>& op, const law_shape& s, const law_inputs<T>& in,
                     std::vector<idx_t> lengths = {}) {
  attn::execution serial;
  return attend(op, s, in, serial, std::move(lengths));
}

// By the streaming form, chunk after chunk.
template <class T>
law_result<T> attend_in_chunks(const law_operator<T>& op, const law_shape& s, const law_inputs<T>& in,
                               const std::vector<idx_t>& chunks, attn::execution& serial) {
  const bound<T> state = op.stream(s);
  law_result<T> r = fresh_result(op, s);
  idx_t begin = 0;
  for (idx_t count : chunks) {
    law_call<T> call = call_of(in, r, serial);
    call.q = call.q.slice(2, begin, count), call.k = call.k.slice(2, begin, count);
    call.v = call.v.slice(2, begin, count), call.out = call.out.slice(2, begin, count);
    if (op.lse) call.lse = call.lse.slice(2, begin, count);
    state(call);
    begin += count;
  }
  return r;
}

template <class T>
law_result<T> attend_in_chunks(const law_operator<T>& op, const law_shape& s, const law_inputs<T>& in,
                               const std::vector<idx_t>& chunks) {
  attn::execution serial;
  return attend_in_chunks(op, s, in, chunks, serial);
}

// Values that must not get through: NaN and both infinities, by turns.
template <class T>
T poison_value(idx_t n) {
  constexpr T values[] = {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity(),
                          -std::numeric_limits<T>::infinity()};
  return values[n % 3];
}

// Fills rows [begin, end) of batch item b with poison values.
template <class T>
void poison_rows(tensor<T>& x, idx_t b, idx_t begin, idx_t end) {
  for (idx_t h = 0; h < x.heads(); ++h)
    for (idx_t i = begin; i < end; ++i)
      for (idx_t d = 0; d < x.dim(); ++d) x(b, h, i, d) = poison_value<T>(h + i + d);
}

}  // namespace testing
