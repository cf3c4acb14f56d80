// What the fragments of README.md use without declaring it. Nothing here is run.
#pragma once

#include <attn/attn.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

using matrix_type = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

attn::index batch = 1, heads = 8, key_heads = 8, length = 512, dim = 64, sb = 1, sh = 1, sl = 1, sd = 1;
float *pointer = nullptr, *qkv = nullptr;
std::uint16_t* bits = nullptr;

attn::tensor_view<float> q, k, v, out, x, part_out, logits, q_t, k_t, v_t, out_t, bias, d_out, dq, dk, dv,
    log_decay;
attn::tensor_view<float, 3> w, band, kernel, lse, part_lse, beta;
matrix_type q_matrix, k_matrix, v_matrix, out_matrix, matrix, x_matrix, wq, wk, wv, wo, up, down;
auto features = attn::draw_features<float>(256, 64, {.seed = 7});
std::vector<float> slope;
std::vector<attn::index> starts;
attn::execution threads;

struct page {
  attn::tensor_view<float> keys, values;
};
std::vector<page> pages;

bool mask(attn::index, attn::index, attn::index) { return true; }

}  // namespace
