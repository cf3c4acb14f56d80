// attn_bench: the tables printed at the end.
#pragma once

#include <string>

#include "sweep.hpp"

namespace bench {

/// The machine's peak, one line per operator and length, and what was not run.
std::string listing(const sweep&, const machine&, const flags&);

/// One line per operator: fitted exponent, time at 4096, of_peak, scratch, error, from which length it is faster than
/// full softmax; error and time of every setting; one line per backward pass.
std::string summary(sweep&, const machine&, const flags&);

}  // namespace bench
