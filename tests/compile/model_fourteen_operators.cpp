// The model of model_one_operator.cpp around fourteen operators, one after the other: a template of each.
#include <attn/fourier/fnet.hpp>
#include <attn/kernel/linear.hpp>
#include <attn/kernel/performer.hpp>
#include <attn/kernel/rfa.hpp>
#include <attn/layers/encoder_block.hpp>
#include <attn/layers/kept_features.hpp>
#include <attn/layers/mean_pool.hpp>
#include <attn/layers/multi_head.hpp>
#include <attn/layers/sinusoidal_positions.hpp>
#include <attn/low_rank/linformer.hpp>
#include <attn/low_rank/long_short.hpp>
#include <attn/low_rank/multipole.hpp>
#include <attn/low_rank/nystrom.hpp>
#include <attn/softmax/bigbird.hpp>
#include <attn/softmax/block.hpp>
#include <attn/softmax/full_softmax.hpp>
#include <attn/softmax/lsh.hpp>
#include <attn/softmax/sliding_window.hpp>
#include <attn/softmax/strided.hpp>

#include "model.hpp"

using on = attn::execution;

void embed(const model& m, const std::vector<int>& ids, std::vector<Eigen::VectorXf>& means, on& exec) {
  const auto e = attn::draw_projection<float>(64, std::ssize(ids), {.seed = 2});
  const attn::kept_features<float> features(256, {.seed = 3});
  auto next = means.begin();
  const auto run = [&](const auto& attend) { run_model(m, ids, *next++, exec, attend); };
  run([](auto q, auto k, auto v, auto out, on& x) { attn::full_softmax(q, k, v, out, x); });
  run([](auto q, auto k, auto v, auto out, on& x) { attn::sliding_window(q, k, v, out, {.left = 8, .right = 8}, x); });
  run([](auto q, auto k, auto v, auto out, on& x) { attn::block(q, k, v, out, {.size = 64}, x); });
  run([](auto q, auto k, auto v, auto out, on& x) { attn::strided(q, k, v, out, {.stride = 16}, x); });
  run([](auto q, auto k, auto v, auto out, on& x) { attn::bigbird(q, k, v, out, {.size = 32}, x); });
  run([](auto q, auto, auto v, auto out, on& x) { attn::lsh(q, v, out, {.buckets = 16}, x); });
  run([](auto q, auto k, auto v, auto out, on& x) { attn::long_short(q, k, v, out, v, {.left = 8, .right = 8}, x); });
  run([&](auto q, auto k, auto v, auto out, on& x) { attn::linformer(q, k, v, out, e, e, {}, x); });
  run([](auto q, auto k, auto v, auto out, on& x) { attn::nystrom(q, k, v, out, {.landmarks = 64}, x); });
  run([](auto q, auto k, auto v, auto out, on& x) { attn::multipole(q, k, v, out, x); });
  run([](auto q, auto k, auto v, auto out, on& x) { attn::linear(q, k, v, out, x); });
  run([=](auto q, auto k, auto v, auto out, on& x) { attn::performer(q, k, v, out, features.of(q), x); });
  run([=](auto q, auto k, auto v, auto out, on& x) { attn::rfa(q, k, v, out, features.of(q), x); });
  run([](auto, auto, auto v, auto out, on& x) { attn::fnet(v, out, x); });
}
