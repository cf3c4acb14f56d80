// attn_bench_mpi: the operators that are measured.
#pragma once

#include <attn/core/execution.hpp>

#include <mpi.h>

#include <string>
#include <vector>

namespace bench::mpi {

using attn::idx_t;

struct settings {
  idx_t heads = 8, kv_heads = 8, dim = 64;
  idx_t length = 8192, linear_length = 32768;              // strong scaling: of the whole sequence
  idx_t part = 4096, linear_part = 16384;                  // weak scaling: of each process
  idx_t window = 128;
  idx_t model_length = 131072, linear_model_length = 8388608;  // of what is modelled
  double bandwidth = 12.5, latency = 2;                    // of the modelled network: GB/s, microseconds
  idx_t machines = 64;
  double seconds = 1;  // for the runs of one line, at least
  bool smoke = false, help = false;
  std::string filter, out;
};

struct network {
  double bandwidth, latency;  // bytes per second each way, seconds
  double seconds(double bytes) const { return bytes > 0 ? latency + bytes / bandwidth : 0; }
};

/// Views of what a process holds: [1, heads, tokens, dim]. lse is what random tokens give.
struct views {
  attn::tensor_view<const float> q, k, v, d_out;
  attn::tensor_view<float> out, dq, dk, dv;
  attn::tensor_view<float, 3> lse;
};

struct entry {
  std::string name;
  const char* colour;    // in the picture
  bool linear = false;  // in the length, which is then longer
  /// Operations the formula needs.
  double (*flops)(const settings&, double length);
  /// What the process sends that sends most, in messages, of `processes` equal ranges.
  double (*sent)(const settings&, double length, double processes);
  /// Seconds on `machines` of one thread, each of which computes `rate` operations a second.
  double (*model)(const settings&, const network&, double rate, double length, double machines);
  void (*alone)(const settings&, const views&, attn::execution&);
  void (*spread)(const settings&, const views&, MPI_Comm, attn::execution&);
};

const std::vector<entry>& operators();

}  // namespace bench::mpi
