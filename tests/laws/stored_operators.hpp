#pragma once
// The operators with elements of any type, forward and backward in one call, for the laws of bfloat16 (bfloat16.cpp).
#include <functional>

#include "support/call_aft.hpp"
#include "support/call_delta_rule.hpp"
#include "support/call_fourier.hpp"
#include "support/call_kernel.hpp"
#include "support/call_long_short.hpp"
#include "support/call_low_rank.hpp"
#include "support/call_lsh.hpp"
#include "support/call_multipole.hpp"
#include "support/call_patterns.hpp"
#include "support/call_topk_blocks.hpp"

namespace testing {

template <class S>
struct stored_form {
  using element = S;
  using values = tensor<element>;

  static constexpr idx_t heads = 4, dim = 33, value_dim = 40, length = 150, features = 20;

  struct inputs {
    values q, k, v, d_out;
    std::vector<idx_t> lengths{};
  };
  struct results {
    values out, dq, dk, dv;
    bool operator==(const results&) const = default;
  };
  struct stored_call {
    in_view<element> q, k, v, d_out;
    out_view<element> out, dq, dk, dv;
    std::vector<idx_t> lengths;
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
    idx_t kv_heads = 2;
    bool square = false;  // values have the dim of keys
  };

  // The same numbers for every element type.
  static values drawn(std::uint64_t seed, idx_t batch, idx_t count, idx_t tokens, idx_t width, double scale = 1) {
    return cast<element>(rounded<Eigen::bfloat16>(random_normal(seed, batch, count, tokens, width, scale)));
  }

  template <template <class> class Compiled>
  static stored_operator softmax(const char* name, bool causal, const auto& set) {
    return {name, causal, [=](const stored_call& c) {
              using compiled = Compiled<element>;
              auto options = c.template options<typename compiled::options>(causal);
              set(options);
              compiled::call(c.q, c.k, c.v, c.out, options, {}, c.execution);
              compiled::backward(c.q, c.k, c.v, c.out, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options, {}, {},
                                 c.execution);
            }};
  }
  template <template <class> class Compiled>
  static stored_operator random_features(const char* name, bool causal) {
    return {name, causal, [=](const stored_call& c) {
              using compiled = Compiled<element>;
              static const values w = drawn(8, 1, 1, features, dim);
              const auto options = c.template options<typename compiled::options>(causal);
              compiled::call(c.q, c.k, c.v, c.out, features_of(w), options, c.execution);
              compiled::backward(c.q, c.k, c.v, features_of(w), c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options,
                                 c.execution);
            }};
  }
  static stored_operator linear(const char* name, bool causal) {
    return {name, causal, [=](const stored_call& c) {
              using compiled = compiled_linear<element>;
              const auto options = c.template options<typename compiled::options>(causal);
              constexpr auto feature = reference::linear_feature::elu_plus_one;
              compiled::call(c.q, c.k, c.v, c.out, options, feature, c.execution);
              compiled::backward(c.q, c.k, c.v, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options, feature,
                                 c.execution);
            }};
  }
  static stored_operator linformer() {
    return {"linformer", false, [](const stored_call& c) {
              using compiled = compiled_linformer<element>;
              static const values e = drawn(9, 1, 1, features, length, 1 / std::sqrt(double(length)));
              const auto options = c.template options<typename compiled::options>(false);
              compiled::call(c.q, c.k, c.v, c.out, features_of(e), features_of(e), options, c.execution);
              compiled::backward(c.q, c.k, c.v, c.out, features_of(e), features_of(e), c.d_out,
                                 {.q = c.dq, .k = c.dk, .v = c.dv}, options, c.execution);
            }};
  }
  static stored_operator nystrom() {
    return {"nystrom", false, [](const stored_call& c) {
              using compiled = compiled_nystrom<element>;
              auto options = c.template options<typename compiled::options>(false);
              options.landmarks = 16;
              compiled::call(c.q, c.k, c.v, c.out, options, c.execution);
              compiled::backward(c.q, c.k, c.v, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options, c.execution);
            }};
  }
  static stored_operator long_short(const char* name, bool causal) {
    return {name, causal, [=](const stored_call& c) {
              using compiled = compiled_long_short<element>;
              // One head's logits serve all heads of all items, so that each may be computed alone.
              static const values logits = drawn(10, 1, 1, length, 6);
              const in_view<element> shared(logits.data.data(), {c.q.extent(0), c.q.extent(1), length, 6},
                                            {0, 0, 6, 1});
              auto options = c.template options<typename compiled::options>(causal);
              options.left = 19, options.right = causal ? 0 : 11, options.segment = causal ? 32 : 0;
              compiled::call(c.q, c.k, c.v, c.out, shared, options, c.execution);
              compiled::backward(c.q, c.k, c.v, c.out, shared, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options,
                                 c.execution);
            }};
  }
  static stored_operator lsh() {
    // Tokens that come later take places in the sorted order, which moves what earlier ones see.
    return {"lsh", false,
            [](const stored_call& c) {
              using compiled = compiled_lsh<element>;
              auto options = c.template options<typename compiled::options>(false);
              options.chunk = 16, options.buckets = 8;
              compiled::call(c.q, c.v, c.out, options, {}, c.execution);
              compiled::backward(c.q, c.v, c.out, c.d_out, {.q = c.dq, .v = c.dv}, options, {}, {}, c.execution);
            },
            heads};
  }

  static stored_operator delta_rule() {
    return {"delta_rule", true,
            [](const stored_call& c) {
              using compiled = compiled_delta_rule<element>;
              auto options = c.template options<typename compiled::options>(true);
              options.unit_norm_eps = 1e-6f;
              compiled::call(c.q, c.k, c.v, c.out, options, c.execution);
              compiled::backward(c.q, c.k, c.v, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options, c.execution);
            },
            heads};
  }
  static stored_operator multipole(const char* name, bool causal) {
    return {name, causal, [=](const stored_call& c) {
              using compiled = compiled_multipole<element>;
              auto options = c.template options<typename compiled::options>(causal);
              options.exact = 20, options.clusters = 6, options.block = 16;
              if (causal) options.segment = 32;
              compiled::call(c.q, c.k, c.v, c.out, options, c.execution);
              compiled::backward(c.q, c.k, c.v, c.out, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options,
                                 c.execution);
            }};
  }
  // Compiled has a parameter w, one for all heads.
  template <template <class> class Compiled>
  static stored_operator attention_free(const char* name, bool causal, values w, const auto& set) {
    return {name, causal,
            [=](const stored_call& c) {
              using compiled = Compiled<element>;
              auto options = c.template options<typename compiled::options>(causal);
              set(options);
              const in_view<element> shared(w.data.data(), w.extents);
              compiled::call(c.q, c.k, c.v, c.out, shared, options, c.execution);
              compiled::backward(c.q, c.k, c.v, shared, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options,
                                 c.execution);
            },
            heads, true};
  }
  static stored_operator aft_simple(const char* name, bool causal) {
    return {name, causal,
            [=](const stored_call& c) {
              using compiled = compiled_aft_simple<element>;
              const auto options = c.template options<typename compiled::options>(causal);
              compiled::call(c.q, c.k, c.v, c.out, options, c.execution);
              compiled::backward(c.q, c.k, c.v, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, options, c.execution);
            },
            heads, true};
  }
  static stored_operator fnet() {  // has no keys and no values
    return {"fnet", false,
            [](const stored_call& c) {
              using compiled = compiled_fnet<element>;
              const auto options = c.template options<typename compiled::options>(false);
              compiled::call(c.q, c.out, options, c.execution);
              compiled::backward(c.d_out, {.x = c.dq}, options, c.execution);
              for (idx_t b = 0; b < c.dv.extent(0); ++b)
                for (idx_t h = 0; h < c.dv.extent(1); ++h)
                  for (idx_t i = 0; i < c.dv.extent(2); ++i)
                    for (idx_t d = 0; d < c.dv.extent(3); ++d) c.dv(b, h, i, d) = element(0);
            },
            heads, true};
  }

  static const std::vector<stored_operator>& stored_operators() {
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
        random_features<compiled_rfa>("rfa causal", true),
        delta_rule(),
        multipole("multipole", false),
        multipole("multipole causal", true),
        attention_free<compiled_aft_full>("aft_full", false, drawn(11, 1, 1, length, length), nothing),
        attention_free<compiled_aft_full>("aft_full causal", true, drawn(11, 1, 1, length, length), nothing),
        attention_free<compiled_aft_local>("aft_local", false, drawn(12, 1, 1, length, length),
                                           [](auto& o) { o.window = 20; }),
        attention_free<compiled_aft_local>("aft_local causal", true, drawn(12, 1, 1, length, length),
                                           [](auto& o) { o.window = 20; }),
        attention_free<compiled_aft_conv>("aft_conv", false, drawn(13, 1, 1, 1, 21), nothing),
        attention_free<compiled_aft_conv>("aft_conv causal", true, drawn(13, 1, 1, 1, 21), nothing),
        aft_simple("aft_simple", false),
        aft_simple("aft_simple causal", true),
        fnet()};
    return all;
  }
};

namespace stored {
using form = stored_form<Eigen::bfloat16>;
using element = form::element;
using values = form::values;
using inputs = form::inputs;
using results = form::results;
using stored_operator = form::stored_operator;
inline constexpr idx_t heads = form::heads, dim = form::dim, value_dim = form::value_dim, length = form::length;
inline values drawn(std::uint64_t seed, idx_t batch, idx_t count, idx_t tokens, idx_t width) {
  return form::drawn(seed, batch, count, tokens, width);
}
inline const std::vector<stored_operator>& stored_operators() { return form::stored_operators(); }
}  // namespace stored

}  // namespace testing
