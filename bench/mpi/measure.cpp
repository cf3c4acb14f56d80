#include "measure.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "../inputs.hpp"

namespace bench::mpi {
namespace {

constexpr int least_rounds = 3, most_rounds = 200;

/// Of this process, contiguous.
views views_of(const settings& set, idx_t tokens, idx_t length) {
  const auto shape = [&](idx_t heads) { return std::array<idx_t, 4>{1, heads, tokens, set.dim}; };
  const auto count = [&](idx_t heads) { return static_cast<std::size_t>(heads * tokens * set.dim); };
  const auto input = [&](role r, idx_t heads) {
    return attn::tensor_view<const float>(drawn_numbers(r, count(heads)), shape(heads));
  };
  const auto result = [&](int slot, idx_t heads) {
    return attn::tensor_view<float>(result_memory(count(heads), slot), shape(heads));
  };
  const auto rows = static_cast<std::size_t>(set.heads * tokens);
  float* const lse = result_memory(rows, 4);
  std::fill_n(lse, rows, std::log(static_cast<float>(length)) + 0.5F);
  return {.q = input(role::query, set.heads),
          .k = input(role::key, set.kv_heads),
          .v = input(role::value, set.kv_heads),
          .d_out = input(role::gradient, set.heads),
          .out = result(0, set.heads),
          .dq = result(1, set.heads),
          .dk = result(2, set.kv_heads),
          .dv = result(3, set.kv_heads),
          .lse = {lse, {1, set.heads, tokens}}};
}

/// One call by those that take part.
void run_once(const settings& set, record& r, MPI_Comm comm, attn::execution& exec) {
  const views x = views_of(set, r.length / static_cast<idx_t>(r.parts()), r.length);
  MPI_Barrier(comm);
  const traffic before = traffic_so_far();
  const double begin = MPI_Wtime();
  if (r.processes == 0)
    r.of->alone(set, x, exec);
  else
    r.of->spread(set, x, comm, exec);
  double seconds = MPI_Wtime() - begin;
  const traffic after = traffic_so_far();
  unsigned long long sent[] = {after.messages - before.messages, after.bytes - before.bytes,
                               after.collective_bytes - before.collective_bytes};
  PMPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, comm);
  PMPI_Allreduce(MPI_IN_PLACE, sent, 3, MPI_UNSIGNED_LONG_LONG, MPI_MAX, comm);
  r.seconds.push_back(seconds);
  r.sent = {sent[0], sent[1], sent[2]};
}

}  // namespace

team::team() {
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &size_);
  for (int n = 1; n < size_; n *= 2) counts_.push_back(n);
  counts_.push_back(size_);
  for (int n : counts_)
    MPI_Comm_split(MPI_COMM_WORLD, rank_ < n ? 0 : MPI_UNDEFINED, rank_, &comms_.emplace_back());
}

team::~team() {
  for (MPI_Comm& comm : comms_)
    if (comm != MPI_COMM_NULL) MPI_Comm_free(&comm);
}

MPI_Comm team::first(int processes) const {
  return comms_[static_cast<std::size_t>(std::ranges::find(counts_, processes) - counts_.begin())];
}

void team::rest() const {
  MPI_Request all = MPI_REQUEST_NULL;
  MPI_Ibarrier(MPI_COMM_WORLD, &all);
  for (int done = 0; MPI_Test(&all, &done, MPI_STATUS_IGNORE), !done;) usleep(200);
}

bool team::agree(bool wanted) const {
  rest();
  int value = wanted;
  PMPI_Bcast(&value, 1, MPI_INT, 0, MPI_COMM_WORLD);
  return value != 0;
}

double record::best() const { return *std::ranges::min_element(seconds); }

double record::median() const {
  std::vector<double> sorted = seconds;
  std::ranges::sort(sorted);
  return sorted[sorted.size() / 2];
}

std::vector<record> measure(const team& all, const settings& set, const entry& of, bool weak) {
  const idx_t whole = of.linear ? set.linear_length : set.length, part = of.linear ? set.linear_part : set.part;
  std::vector<record> lines;
  const auto add = [&](int processes, idx_t count) {
    const idx_t even = 2 * count;  // zigzag order needs parts of the same size
    lines.push_back({.of = &of, .weak = weak, .length = (weak ? part * count : whole) / even * even,
                     .processes = processes});
  };
  add(0, 1);
  for (int n : all.counts()) add(n, n);

  attn::execution exec;
  double spent = 0;
  bool more = true;
  for (int round = 0; more; ++round) {
    for (record& line : lines) {
      all.rest();
      const MPI_Comm comm = all.first(std::max(line.processes, 1));
      if (comm != MPI_COMM_NULL) run_once(set, line, comm, exec);
      all.rest();
      if (!line.seconds.empty()) spent += line.seconds.back();
    }
    if (round == 0) {  // memory was new
      for (record& line : lines) line.seconds.clear();
      spent = 0;
    }
    const bool enough = round >= least_rounds && spent >= set.seconds * static_cast<double>(lines.size());
    more = all.agree(round == 0 || (!set.smoke && !enough && round < most_rounds));
  }
  return lines;
}

}  // namespace bench::mpi
