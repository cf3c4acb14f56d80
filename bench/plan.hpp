// attn_bench: what is worth running first.
#pragma once

#include <string>
#include <vector>

#include "variant.hpp"

namespace bench {

/// Groups of runs, the most worthwhile first. The main curve is always run; the others in this order, while time is left.
enum class tier {
  main_curve,   // every operator, forward, at the main lengths: 256, 1024, 4096 and 16384
  other_forms,  // causal, decoding and backward passes at 1024 and 4096
  between,      // the lengths between, up to where the main curve (of other forms: 4096) ends
  settings,     // other settings of an operator, at 4096
  longer        // the rest
};
inline constexpr tier all_tiers[] = {tier::main_curve, tier::other_forms, tier::between, tier::settings, tier::longer};
const char* name_of(tier);

/// Lengths are doubled up to 16384, where operators overtake each other; fewer beyond, where curves are straight. Of
/// backward passes the powers of 4 that are among them: they follow the forward curves. Of a setting that is not the
/// flags', one.
std::vector<idx_t> lengths_of(const variant&, const flags&);

/// Those of the main lengths that are in the flags' range; where none is, every second length.
std::vector<idx_t> main_lengths(const flags&);

tier tier_of(const variant&, idx_t length, const flags&);

/// The lengths from which exponents are fitted: those of the main curve, without the shortest where there are more than
/// two. At 256 tokens some calls are all overhead.
std::vector<idx_t> fitted_lengths(const flags&);

/// "full_softmax_backward 8192 16384, linear 65536": what was not run, one entry for each operator.
std::string listed(const std::vector<std::pair<std::string, idx_t>>& names_and_lengths);

}  // namespace bench
