// attn_bench_mpi: tables, and the file of results.
#pragma once

#include <string>
#include <vector>

#include "../machine.hpp"
#include "measure.hpp"

namespace bench::mpi {

/// Strong scaling, weak scaling, and what the model says of more machines.
std::string tables(const settings&, const machine&, const std::vector<record>&);

/// In the form of Google Benchmark: "context", and "benchmarks" with a row for each line; and "model".
void write_json(const std::string& path, const settings&, const machine&, const std::vector<record>&);

}  // namespace bench::mpi
