#pragma once
// softmax(s Q K̃ᵀ) A⁺ softmax(s Q̃ Kᵀ) V with A = softmax(s Q̃ K̃ᵀ), Q̃ and K̃ the means of m segments (Xiong 2021).
// The exact pseudo-inverse is Eigen's. Hidden keys, and landmarks of hidden keys alone, are left out: A has fewer
// columns.
#include "reference/softmax.hpp"

namespace reference {

class variable;

enum class pinv { per_head, whole_batch, exact };

struct nystrom_options : softmax_options {
  idx_t landmarks = 64, iterations = 6;
  pinv inverse = pinv::per_head;
  double cutoff = 0;           // s becomes s / (s² + cutoff² (largest² - s²))
  tensor<double> convolution;  // [1, 1, H, width]
};

// In nystrom.cpp: Eigen's decomposition takes seconds to compile.
result nystrom(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v, const nystrom_options&);
// out alone, of double or variable; `convolution` in place of that of the options. Of variables the exact inverse is
// computed by elimination: A must not be singular, nor nearly so.
template <class N>
tensor<N> nystrom(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v, const tensor<N>& convolution,
                  const nystrom_options&);

}  // namespace reference
