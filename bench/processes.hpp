// attn_bench: what processes of one thread do at the same time, beside which several threads of one are judged.
#pragma once

#include "variant.hpp"

namespace bench {

/// Calls per second of `count` processes in all, each of which makes them one after another on one thread for about
/// `seconds`, at least one, while the others do. Each has what it writes to itself; what it only reads the processes
/// share. 0 where it cannot be known: where processes cannot be forked, or one of them failed.
double calls_per_second(int count, const workload&, double seconds);

}  // namespace bench
