// attn_bench_mpi: how lines are measured.
#pragma once

#include <vector>

#include "operators.hpp"
#include "traffic.hpp"

namespace bench::mpi {

/// The processes of the job. Of a line that fewer are measured on, the others sleep, so that they disturb nobody.
class team {
 public:
  team();
  ~team();
  team(const team&) = delete;
  team& operator=(const team&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// 1, 2, 4, ..., and all.
  const std::vector<int>& counts() const { return counts_; }
  /// The first `processes`; null on the others.
  MPI_Comm first(int processes) const;
  /// Waits for all, sleeping.
  void rest() const;
  /// What process 0 says.
  bool agree(bool wanted) const;

 private:
  int rank_ = 0, size_ = 1;
  std::vector<int> counts_;
  std::vector<MPI_Comm> comms_;
};

/// One line of the tables. What is measured stands on process 0 alone.
struct record {
  const entry* of = nullptr;
  bool weak = false;
  idx_t length = 0;   // of the whole sequence
  int processes = 0;  // 0: the operator of one process, without MPI
  std::vector<double> seconds{};  // each of the slowest process
  traffic sent{};                 // by one call of the process that sends most

  double best() const;
  double median() const;
  double parts() const { return processes > 0 ? processes : 1; }
  double rate(const settings& set) const { return of->flops(set, static_cast<double>(length)) / best(); }
};

/// The operator alone, and by each number of processes, in turn, so that what disturbs the machine disturbs all of
/// them.
std::vector<record> measure(const team&, const settings&, const entry&, bool weak);

}  // namespace bench::mpi
