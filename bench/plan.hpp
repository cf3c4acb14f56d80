// attn_bench: what is worth running first.
#pragma once

#include <string>
#include <vector>

#include "order.hpp"
#include "variant.hpp"

namespace bench {

/// The length at which operators are compared, by tables and pictures, where it is measured: that of the data of
/// --input, beside whose errors times stand, unless another is asked for; otherwise usual_length.
idx_t comparison_length(const flags&);

/// Lengths are doubled up to 16384, where operators overtake each other; fewer beyond, where curves are straight. Of
/// backward passes the powers of 4 that are among them: they follow the forward curves. Of a setting that is not the
/// flags', one. The length of --input's data is among them, however long it is.
std::vector<idx_t> lengths_of(const variant&, const flags&);

/// The one of them at which the operator is compared: the longest where comparison_length is not among them.
idx_t compared_length(const std::vector<idx_t>&, const flags&);

/// Those of the main lengths that are in the flags' range; where none is, every second length.
std::vector<idx_t> main_lengths(const flags&);

tier tier_of(const variant&, idx_t length, const flags&);

/// The lengths from which exponents are fitted: those of the main curve, without the shortest where there are more than
/// two. At 256 tokens some calls are all overhead.
std::vector<idx_t> fitted_lengths(const flags&);

/// "full_softmax_backward 8192 16384, linear 65536": what was not run, one entry for each operator.
std::string listed(const std::vector<std::pair<std::string, idx_t>>& names_and_lengths);

}  // namespace bench
