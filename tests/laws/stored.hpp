#pragma once
// The laws of bfloat16 (bfloat16.cpp) call an operator forward and backward at once, at one shape. An operator joins in
// its file operators/NAME.cpp by one object of stored_entries.
#include <functional>

#include "support/call.hpp"
#include "support/random.hpp"
#include "support/run.hpp"

namespace testing {

namespace stored {
inline constexpr idx_t heads = 4, dim = 33, value_dim = 40, length = 150, features = 20;

// The same numbers for every element type.
template <class S = Eigen::bfloat16>
tensor<S> drawn(std::uint64_t seed, idx_t batch, idx_t count, idx_t tokens, idx_t width, double scale = 1) {
  return cast<S>(rounded<Eigen::bfloat16>(random_normal(seed, batch, count, tokens, width, scale)));
}
template <class S>
attn::tensor_view<const S, 3> matrices(const tensor<S>& x) {
  return {x.data.data(), {x.heads(), x.length(), x.dim()}};
}
}  // namespace stored

template <class S>
struct stored_call {
  in_view<S> q, k, v, d_out;
  out_view<S> out, dq, dk, dv;
  std::vector<idx_t> lengths;
  attn::execution& execution;

  template <class Compiled>
  typename Compiled::options options(bool causal) const {
    typename Compiled::options to;
    if constexpr (requires { to.lengths; }) to.lengths = lengths;
    if constexpr (requires { to.causal; }) to.causal = causal;
    return to;
  }
};

template <class S>
struct stored_operator {
  std::string name;
  bool causal;
  std::function<void(const stored_call<S>&)> run;
  idx_t kv_heads = 2;
  bool square = false;  // values have the dim of keys
  bool padding = true;  // it has lengths
  idx_t reach = 0;      // how many rows after its own a query's gradient may depend on
};

// Of an operator of the softmax family; set(options) sets what is its own.
template <template <class> class Compiled, class S>
stored_operator<S> stored_softmax(std::string name, bool causal, auto set) {
  return {.name = std::move(name), .causal = causal, .run = [=](const stored_call<S>& c) {
            using compiled = Compiled<S>;
            auto options = c.template options<compiled>(causal);
            set(options);
            compiled::call(c.q, c.k, c.v, c.out, options, {}, c.execution);
            compiled::backward(c.q, c.k, c.v, c.out, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options, {}, {},
                               c.execution);
          },
          .padding = requires(typename Compiled<S>::options o) { o.lengths; }};
}

// Of performer and rfa.
template <template <class> class Compiled, class S>
stored_operator<S> stored_random_features(std::string name, bool causal) {
  return {std::move(name), causal, [=](const stored_call<S>& c) {
            using compiled = Compiled<S>;
            static const tensor<S> w = stored::drawn<S>(8, 1, 1, stored::features, stored::dim);
            const auto options = c.template options<compiled>(causal);
            compiled::call(c.q, c.k, c.v, c.out, stored::matrices(w), options, c.execution);
            compiled::backward(c.q, c.k, c.v, stored::matrices(w), c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options,
                               c.execution);
          }};
}

// The table, as law_entries: `all` is a vector of stored_operator<Eigen::bfloat16>, or of those of float that their
// results are compared with.
class stored_entries {
 public:
  template <class Add>
  stored_entries(std::string name, [[maybe_unused]] Add add) : name_(std::move(name)) {
#if !defined(ATTN_TEST_FLOAT_ALONE)
    bfloat16_ = add, float_ = add;
    table().push_back(this);
#endif
  }
  stored_entries(const stored_entries&) = delete;

  static std::vector<const stored_entries*>& table() {
    static std::vector<const stored_entries*> all;
    return all;
  }
  const std::string& name() const { return name_; }
  void add_to(std::vector<stored_operator<Eigen::bfloat16>>& all) const { bfloat16_(all); }
  void add_to(std::vector<stored_operator<float>>& all) const { float_(all); }

 private:
  std::string name_;
  std::function<void(std::vector<stored_operator<Eigen::bfloat16>>&)> bfloat16_;
  std::function<void(std::vector<stored_operator<float>>&)> float_;
};

template <class S>
const std::vector<stored_operator<S>>& stored_operators() {
  static const auto operators = [] {
    std::vector<stored_operator<S>> all;
    for (const stored_entries* entries : stored_entries::table()) entries->add_to(all);
    return all;
  }();
  return operators;
}

}  // namespace testing
