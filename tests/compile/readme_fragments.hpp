// What the fragments of the README files use without declaring it. Nothing here is run.
#pragma once

#include <attn/attn.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace {

using matrix_type = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

attn::idx_t batch = 1, heads = 8, key_heads = 8, length = 512, dim = 64, value_dim = 48, products = 2, sb = 1, sh = 1,
            sl = 1, sd = 1, slots = 64, rows = 16, columns = 32;
float *pointer = nullptr, *qkv = nullptr, *k_rows = nullptr, *v_rows = nullptr, *b_rows = nullptr, *c_rows = nullptr,
      lambda = 0;
std::uint16_t* bits = nullptr;

attn::tensor_view<float> q, k, v, out, x, part_out, logits, a, b, q_t, k_t, v_t, a_t, b_t, out_t, bias, d_out, dq, dk,
    dv, log_decay, query_plus_u, query_plus_v, q_index, k_index, weights_of, keys_memory, values_memory, other_keys,
    other_values, q_latent, latent_t, out_latent, x_delta, gamma_x, beta_x, slot_decay, taken, slot_weights;
attn::tensor<std::int32_t> lists;
attn::tensor_view<float, 2> buckets, d_buckets;
attn::tensor_view<float, 3> w, band, kernel, lse, part_lse, beta, sums_of_keys, decays, d_decays, decays_so_far,
    keys_by_distance;
matrix_type q_matrix, k_matrix, v_matrix, out_matrix, matrix, x_matrix, wq, wk, wv, wo, up, down, q_a, q_b, kv_a, kv_b;
Eigen::VectorXf bq, bk, bv, bo, b_up, b_down, gamma_1, beta_1, gamma_2, beta_2;
auto features = attn::draw_features<float>(256, 64, {.seed = 7});
std::vector<float> slope, sinks, q_gamma, kv_gamma, bonus, decay;
attn::tensor_view<bool, 2> tokens_seen;
std::uint64_t step = 0;
std::vector<std::uint8_t> mask;
std::vector<attn::idx_t> offsets, key_offsets, lengths, survivors, tokens_there, kept;
attn::kv_cache<float> cache({.dim = 64});
attn::linear_state<float> sums({.features = 64, .value_dim = 64, .keep = 2});
attn::rotary_options<float> rope;
attn::execution threads;

struct pattern_of_readme {
  attn::idx_t query_sets(const attn::pattern_shape&) const { return 1; }
  attn::position_range queries(const attn::pattern_shape& s, attn::idx_t) const { return {s.first_position(), s.keys}; }
  void keys(const attn::pattern_shape& s, attn::idx_t set, auto&& see) const { see(queries(s, set)); }
} my_pattern;

}  // namespace
