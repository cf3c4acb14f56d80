#pragma once
#include "reference/lightning_indexer.hpp"

namespace testing {

// lightning_indexer by the library, with the options of a reference: float, double.
template <class S>
tensor<idx_t> chosen_by_library(const tensor<S>& q, const tensor<S>& k, const reference::indexer_options& options);

}  // namespace testing
