// The operators that a byte model may use, one entry each.
#pragma once

#include "speed.hpp"

#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>

namespace byte_model {

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using in = attn::tensor_view<const float>;  // [batch, heads, length, dim]
using to = attn::tensor_view<float>;

// What a model is made of.
struct sizes {
  idx_t layers = 4, width = 256, heads = 4, context = 512;
  bool masked = false, reversible = false;
};

// The arguments of a block's operator and, with the rest, of its backward pass.
struct call {
  in q, k, v;
  to out;
  attn::tensor_view<float, 3> lse;
  const matrix& own;  // parameters the operator itself learns
  execution& exec;
  in d_out{};
  to dq{}, dk{}, dv{};
  matrix* d_own = nullptr;

  idx_t length() const { return q.extent(2); }  // the context, but for what is written after training
};
using operation = std::function<void(const call&)>;

struct own_parameters {
  idx_t rows = 0, columns = 0;
  double deviation = 0;  // of the normal numbers that training starts from
};

struct mixer {
  std::string name;
  operation forward, backward;
  std::function<operation()> stream;  // makes one with its own state, for single tokens
  own_parameters own;
  bool keys = true, projects = true;  // whether there are projections for keys, and any at all
  double scores = 0;                  // of a query and a key in a head, of those operators whose arithmetic is counted
};

inline void scale(const to& x, float factor) {
  for (idx_t b = 0; b < x.extent(0); ++b)
    for (idx_t h = 0; h < x.extent(1); ++h)
      for (idx_t i = 0; i < x.extent(2); ++i)
        for (idx_t d = 0; d < x.extent(3); ++d) x(b, h, i, d) = factor == 0 ? 0 : factor * x(b, h, i, d);
}

// One entry an operator, in add(name, options, forward, backward).
inline list<mixer> mixers(const sizes& s) {
  const bool causal = !s.masked;
  const idx_t dim = s.width / s.heads, near = std::max<idx_t>(1, s.context / 8);
  const attn::state_extents extents{.heads = s.heads, .dim = dim};
  list<mixer> all;
  const auto add = [&](const char* name, const auto& options, const auto& forward, const auto& backward) -> mixer& {
    const auto with_options = [&](const auto& f) -> operation {
      return [=](const call& c) {
        auto o = options;
        if constexpr (requires { o.lse; }) o.lse = c.lse;
        f(c, o);
      };
    };
    return all.emplace_back(mixer{name, with_options(forward), with_options(backward), {}, {}});
  };
  const auto stream = [](const auto& state, const auto& step) -> std::function<operation()> {
    return [=] { return [state = state, step](const call& c) mutable { step(state, c); }; };
  };

  add(
      "full_softmax", attn::full_softmax_options<float>{.causal = causal},
      [](auto& c, auto& o) { attn::full_softmax(c.q, c.k, c.v, c.out, o, c.exec); },
      [](auto& c, auto& o) {
        attn::full_softmax_backward(c.q, c.k, c.v, c.out, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, o, c.exec);
      });
  all.back().stream = stream(attn::kv_cache<float>(extents), [](auto& cache, auto& c) {
    attn::full_softmax_step(cache, c.q, c.k, c.v, c.out, c.exec);
  });
  all.back().scores = double(s.context) * double(causal ? s.context + 1 : 2 * s.context) / 2;
  add(
      "sliding_window", attn::sliding_window_options<float>{.causal = causal, .left = near, .right = near},
      [](auto& c, auto& o) { attn::sliding_window(c.q, c.k, c.v, c.out, o, c.exec); },
      [](auto& c, auto& o) {
        attn::sliding_window_backward(c.q, c.k, c.v, c.out, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, o, c.exec);
      });
  all.back().stream = stream(attn::sliding_window_cache<float>(extents, {.left = near}), [](auto& cache, auto& c) {
    attn::sliding_window_step(cache, c.q, c.k, c.v, c.out, c.exec);
  });
  add(
      "pointwise",
      attn::pointwise_options<float>{.causal = causal, .shift = -std::log(static_cast<float>(s.context))},
      [](auto& c, auto& o) { attn::pointwise(c.q, c.k, c.v, c.out, o, c.exec); },
      [](auto& c, auto& o) {
        attn::pointwise_backward(c.q, c.k, c.v, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, o, c.exec);
      });
  all.back().stream = stream(attn::kv_cache<float>(extents), [shift = -std::log(static_cast<float>(s.context))](
                                                                 auto& cache, auto& c) {
    attn::pointwise_step(cache, c.q, c.k, c.v, c.out, {.shift = shift}, c.exec);
  });
  add(
      "block", attn::block_options<float>{.causal = causal, .size = near},
      [](auto& c, auto& o) { attn::block(c.q, c.k, c.v, c.out, o, c.exec); },
      [](auto& c, auto& o) {
        attn::block_backward(c.q, c.k, c.v, c.out, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, o, c.exec);
      });
  for (const auto kind : {attn::strided_kind::strided, attn::strided_kind::fixed})
    add(
        kind == attn::strided_kind::fixed ? "strided_fixed" : "strided",
        attn::strided_options<float>{.causal = causal, .kind = kind, .stride = near / 2 + 1},
        [](auto& c, auto& o) { attn::strided(c.q, c.k, c.v, c.out, o, c.exec); },
        [](auto& c, auto& o) {
          attn::strided_backward(c.q, c.k, c.v, c.out, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, o, c.exec);
        });
  const idx_t size = near / 2 + 1;
  const auto drawn = attn::draw_random_blocks(s.context / size + 1, 2, {.seed = 1, .causal = causal});
  const auto with_random = [=](auto& c, auto& o, const auto& f) {
    const idx_t blocks = (c.length() + size - 1) / size;
    auto table = drawn;
    for (idx_t n = 0; n < table.size(); ++n)
      if (table.data()[n] >= blocks) table.data()[n] = -1;  // none, in a text shorter than the context
    o.random = table.view().slice(1, 0, blocks);
    f();
  };
  add(
      "bigbird", attn::bigbird_options<float>{.causal = causal, .size = size},
      [=](auto& c, auto& o) { with_random(c, o, [&] { attn::bigbird(c.q, c.k, c.v, c.out, o, c.exec); }); },
      [=](auto& c, auto& o) {
        with_random(c, o, [&] {
          attn::bigbird_backward(c.q, c.k, c.v, c.out, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, o, c.exec);
        });
      });
  // The places of tokens in the order of buckets depend on all of them, so in truth lsh is causal in values only.
  add(
      "lsh", attn::lsh_options<float>{.causal = causal, .buckets = 16, .chunk = size, .seed = 1},
      [](auto& c, auto& o) { attn::lsh(c.q, c.v, c.out, o, c.exec); },
      [](auto& c, auto& o) {
        attn::lsh_backward(c.q, c.v, c.out, c.d_out, {.q = c.dq, .v = c.dv}, o, c.exec);
        scale(c.dk, 0);
      });
  all.back().keys = false;
  // Two compressed keys for every segment, by logits that depend on the position alone.
  const auto logits = [context = s.context](auto& c) -> in {
    const idx_t rows = c.q.extent(1) * context;
    return {c.own.data(), {c.q.extent(0), c.q.extent(1), c.length(), rows > 0 ? 2 : 0}, {0, context * 2, 2, 1}};
  };
  add(
      "long_short",
      attn::long_short_options<float>{.causal = causal, .left = near, .right = near, .segment = causal ? near : 0},
      [=](auto& c, auto& o) { attn::long_short(c.q, c.k, c.v, c.out, logits(c), o, c.exec); },
      [=](auto& c, auto& o) {
        attn::tensor<float> d({c.q.extent(0), c.q.extent(1), c.length(), 2});
        attn::long_short_backward(c.q, c.k, c.v, c.out, logits(c), c.d_out,
                                  {.q = c.dq, .k = c.dk, .v = c.dv, .logits = d}, o, c.exec);
        c.d_own->setZero();
        for (idx_t n = 0; n < c.q.extent(0); ++n)
          *c.d_own += matrix::Map(d.data() + n * c.d_own->size(), c.d_own->rows(), c.d_own->cols());
      });
  all.back().own = {s.heads * s.context, 2, 1};
  attn::multipole_options<float> eighth{.causal = causal, .exact = near, .clusters = causal ? 8 : near, .block = near};
  if (causal) eighth.segment = near;
  add(
      "multipole", eighth, [](auto& c, auto& o) { attn::multipole(c.q, c.k, c.v, c.out, o, c.exec); },
      [](auto& c, auto& o) {
        attn::multipole_backward(c.q, c.k, c.v, c.out, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, o, c.exec);
      });
  add(
      "linear", attn::linear_options<float>{.causal = causal},
      [](auto& c, auto& o) { attn::linear(c.q, c.k, c.v, c.out, o, c.exec); },
      [](auto& c, auto& o) {
        attn::linear_backward(c.q, c.k, c.v, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, o, c.exec);
      });
  all.back().stream = stream(attn::linear_state<float>({.heads = s.heads, .features = dim, .value_dim = dim}),
                             [](auto& state, auto& c) { attn::linear_step(state, c.q, c.k, c.v, c.out, c.exec); });
  const attn::kernel_state_extents features{.heads = s.heads, .features = 2 * dim, .value_dim = dim};
  const auto w = attn::draw_features<float>(features.features, dim, {.seed = 1});
  add(
      "performer", attn::performer_options<float>{.causal = causal},
      [w](auto& c, auto& o) { attn::performer(c.q, c.k, c.v, c.out, w, o, c.exec); },
      [w](auto& c, auto& o) {
        attn::performer_backward(c.q, c.k, c.v, w, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, o, c.exec);
      });
  all.back().stream = stream(attn::performer_state<float>(features), [w](auto& state, auto& c) {
    attn::performer_step(state, c.q, c.k, c.v, c.out, w, c.exec);
  });
  add(
      "rfa", attn::rfa_options<float>{.causal = causal, .eps = 1e-3f, .norm_eps = 1e-3f},
      [w](auto& c, auto& o) { attn::rfa(c.q, c.k, c.v, c.out, w, o, c.exec); },
      [w](auto& c, auto& o) {
        attn::rfa_backward(c.q, c.k, c.v, w, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, o, c.exec);
      });
  all.back().stream = stream(attn::rfa_state<float>(features), [w](auto& state, auto& c) {
    attn::rfa_step(state, c.q, c.k, c.v, c.out, w, {.eps = 1e-3f, .norm_eps = 1e-3f}, c.exec);
  });
  add(
      "aft_full", attn::aft_full_options<float>{.causal = causal},
      [](auto& c, auto& o) {
        attn::aft_full(c.q, c.k, c.v, c.out, c.own.topLeftCorner(c.length(), c.length()), o, c.exec);
      },
      [](auto& c, auto& o) {
        attn::aft_full_backward(c.q, c.k, c.v, c.own, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv, .w = *c.d_own}, o,
                                c.exec);
      });
  all.back().own = {s.context, s.context, 0.1};
  all.back().stream = stream(attn::kv_cache<float>(extents), [](auto& cache, auto& c) {
    attn::aft_full_step(cache, c.q, c.k, c.v, c.out, c.own, c.exec);
  });
  add(
      "aft_local", attn::aft_local_options<float>{.causal = causal, .window = near, .band = true},
      [](auto& c, auto& o) { attn::aft_local(c.q, c.k, c.v, c.out, c.own.topRows(c.length()), o, c.exec); },
      [](auto& c, auto& o) {
        attn::aft_local_backward(c.q, c.k, c.v, c.own, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv, .w = *c.d_own}, o,
                                 c.exec);
      });
  all.back().own = {s.context, 2 * near - 1, 0.1};
  all.back().stream = stream(attn::aft_local_state<float>(extents, {.window = near}), [](auto& state, auto& c) {
    attn::aft_local_step(state, c.q, c.k, c.v, c.out, c.own, {.band = true}, c.exec);
  });
  add(
      "aft_conv", attn::aft_conv_options<float>{.causal = causal},
      [](auto& c, auto& o) { attn::aft_conv(c.q, c.k, c.v, c.out, c.own, o, c.exec); },
      [](auto& c, auto& o) {
        attn::aft_conv_backward(c.q, c.k, c.v, c.own, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv, .w = *c.d_own}, o,
                                c.exec);
      });
  all.back().own = {s.heads, 2 * near - 1, 0.1};
  all.back().stream = stream(attn::aft_conv_state<float>(extents, {.width = 2 * near - 1}), [](auto& state, auto& c) {
    attn::aft_conv_step(state, c.q, c.k, c.v, c.out, c.own, c.exec);
  });
  add(
      "aft_simple", attn::aft_simple_options<float>{.causal = causal},
      [](auto& c, auto& o) { attn::aft_simple(c.q, c.k, c.v, c.out, o, c.exec); },
      [](auto& c, auto& o) {
        attn::aft_simple_backward(c.q, c.k, c.v, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, o, c.exec);
      });
  all.back().stream = stream(attn::aft_simple_state<float>(extents),
                             [](auto& state, auto& c) { attn::aft_simple_step(state, c.q, c.k, c.v, c.out, c.exec); });
  if (causal) return all;

  const idx_t rank = std::max<idx_t>(1, s.context / 4);
  const auto e = [=](auto& c) { return c.own.topLeftCorner(rank, c.length()); };
  const auto f = [=](auto& c) { return c.own.bottomLeftCorner(rank, c.length()); };
  add(
      "linformer", attn::linformer_options<float>{},
      [=](auto& c, auto& o) { attn::linformer(c.q, c.k, c.v, c.out, e(c), f(c), o, c.exec); },
      [=](auto& c, auto& o) {
        attn::linformer_backward(
            c.q, c.k, c.v, c.out, e(c), f(c), c.d_out,
            {.q = c.dq, .k = c.dk, .v = c.dv, .e = c.d_own->topRows(rank), .f = c.d_own->bottomRows(rank)}, o, c.exec);
      });
  all.back().own = {2 * rank, s.context, 1 / std::sqrt(double(rank))};
  add(
      "nystrom", attn::nystrom_options<float>{.landmarks = near},
      [](auto& c, auto& o) { attn::nystrom(c.q, c.k, c.v, c.out, o, c.exec); },
      [](auto& c, auto& o) {
        attn::nystrom_backward(c.q, c.k, c.v, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, o, c.exec);
      });
  // The transform makes numbers sqrt(length width) times as large.
  const auto unit = [](auto& c) { return 1 / std::sqrt(float(c.length() * c.q.extent(3))); };
  add(
      "fnet", attn::fnet_options<float>{},
      [=](auto& c, auto& o) { attn::fnet(c.q, c.out, o, c.exec), scale(c.out, unit(c)); },
      [=](auto& c, auto& o) { attn::fnet_backward(c.d_out, {.x = c.dq}, o, c.exec), scale(c.dq, unit(c)); });
  all.back().projects = false;
  return all;
}

inline const mixer& mixer_of(const list<mixer>& all, const std::string& name) {
  std::string names;
  for (const mixer& m : all) {
    if (m.name == name) return m;
    names += ' ' + m.name;
  }
  throw std::runtime_error("no operator here is called " + name + "; these are there:" + names);
}

}  // namespace byte_model
