#include <Eigen/Core>

#include "operators.hpp"

namespace semantic_search { namespace {

// A baseline that looks at nothing: every query gets the mean of all values.
const add_operator mean_of_values("mean_of_values", [](auto&, auto&, auto& v, auto& out, auto&) {
  const idx_t length = v.extent(2), dim = v.extent(3);
  for (idx_t h = 0; h < v.extent(1); ++h) {
    Eigen::RowVectorXf mean = Eigen::RowVectorXf::Zero(dim);
    for (idx_t t = 0; t < length; ++t)
      for (idx_t d = 0; d < dim; ++d) mean[d] += v(0, h, t, d) / float(length);
    for (idx_t t = 0; t < length; ++t)
      for (idx_t d = 0; d < dim; ++d) out(0, h, t, d) = mean[d];
  }
});

}}  // namespace semantic_search
