// attn_bench_mpi: what this process sends, counted.
#pragma once

#include <cstddef>

namespace bench {

/// Since the program began. Counted outside the library, where it calls MPI, so nothing can be forgotten.
struct traffic {
  std::size_t messages = 0, bytes = 0;  // from this process to one other
  std::size_t collective_bytes = 0;     // given to collective calls: what is agreed on before an operator begins
};
traffic traffic_so_far();

}  // namespace bench
