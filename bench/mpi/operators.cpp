#include "operators.hpp"

#include <attn/kernel/linear.hpp>
#include <attn/mpi/full_softmax_backward.hpp>
#include <attn/mpi/linear.hpp>
#include <attn/mpi/sliding_window.hpp>
#include <attn/softmax/full_softmax_backward.hpp>
#include <attn/softmax/sliding_window.hpp>

#include <algorithm>
#include <cmath>

namespace bench::mpi {
namespace {

double token_bytes(const settings& set) { return static_cast<double>(2 * set.kv_heads * set.dim) * sizeof(float); }
double score_flops(const settings& set, double scores) {
  return 4.0 * scores * static_cast<double>(set.heads * set.dim);
}

double full_flops(const settings& set, double n) { return score_flops(set, n * n); }
double causal_flops(const settings& set, double n) { return score_flops(set, n * (n + 1) / 2); }

/// Keys and values of all processes but the next one pass through each.
double ring_sent(const settings& set, double length, double processes) {
  return (processes - 1) / processes * length * token_bytes(set);
}

/// Gradients come back to where they began.
double backward_sent(const settings& set, double length, double processes) {
  return ring_sent(set, length, processes) + (processes > 1 ? length * token_bytes(set) : 0);
}

/// In each of P steps a process attends to one part while it sends another; in the last it sends none. Everyone waits
/// for the slowest, whose P parts take `flops` each.
double ring(const settings& set, const network& net, double rate, double length, double machines, double flops) {
  const double computed = flops / rate, sent = net.seconds(length / machines * token_bytes(set));
  return (machines - 1) * std::max(computed, sent) + computed;
}
double ring_full(const settings& set, const network& net, double rate, double length, double machines) {
  return ring(set, net, rate, length, machines, full_flops(set, length) / (machines * machines));
}
double ring_zigzag(const settings& set, const network& net, double rate, double length, double machines) {
  return ring(set, net, rate, length, machines, causal_flops(set, length) / (machines * machines));
}
/// The same with gradients beside keys and values; they travel one step more.
double backward_flops(const settings& set, double n) { return 2.5 * causal_flops(set, n); }
double ring_backward(const settings& set, const network& net, double rate, double length, double machines) {
  const double computed = backward_flops(set, length) / (machines * machines) / rate,
               part = length / machines * token_bytes(set);
  if (machines < 2) return computed;
  return (machines - 1) * std::max(computed, net.seconds(2 * part)) + computed + net.seconds(part);
}
/// The last process sees the parts of all others whole.
double ring_causal(const settings& set, const network& net, double rate, double length, double machines) {
  const double part = length / machines;
  return ring(set, net, rate, length, machines,
              ((machines - 1) * full_flops(set, part) + causal_flops(set, part)) / machines);
}

template <bool Causal>
void full_alone(const settings&, const views& x, attn::execution& exec) {
  attn::full_softmax(x.q, x.k, x.v, x.out, {.causal = Causal}, exec);
}
template <bool Causal, bool Zigzag>
void full_spread(const settings&, const views& x, MPI_Comm comm, attn::execution& exec) {
  attn::mpi::full_softmax(x.q, x.k, x.v, x.out, comm, {.causal = Causal, .zigzag = Zigzag}, exec);
}

void backward_alone(const settings&, const views& x, attn::execution& exec) {
  attn::full_softmax_backward(x.q, x.k, x.v, x.out, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv},
                              {.causal = true, .lse = x.lse}, exec);
}
void backward_spread(const settings&, const views& x, MPI_Comm comm, attn::execution& exec) {
  attn::mpi::full_softmax_backward(x.q, x.k, x.v, x.out, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv}, comm,
                                   {.causal = true, .lse = x.lse, .zigzag = true}, exec);
}

double window_flops(const settings& set, double n) {
  const double w = std::min(static_cast<double>(set.window), n - 1);
  return score_flops(set, n + 2 * (n * w - w * (w + 1) / 2));
}
/// Keys and values next to the border go to the neighbours, and beyond them where ranges are shorter than the window.
double window_sent(const settings& set, double length, double processes) {
  const double w = static_cast<double>(set.window), part = length / processes;
  double most = 0;
  for (double p = 0; p < processes; ++p) {
    double tokens = 0;
    for (double q = 0; q < processes; ++q)
      if (q != p) tokens += std::clamp(w - (std::abs(q - p) - 1) * part, 0.0, part);
    most = std::max(most, tokens);
  }
  return most * token_bytes(set);
}
/// Exchanged first, computed then.
double window_model(const settings& set, const network& net, double rate, double length, double machines) {
  return window_flops(set, length) / machines / rate + net.seconds(window_sent(set, length, machines));
}

void window_alone(const settings& set, const views& x, attn::execution& exec) {
  attn::sliding_window(x.q, x.k, x.v, x.out, {.left = set.window, .right = set.window}, exec);
}
void window_spread(const settings& set, const views& x, MPI_Comm comm, attn::execution& exec) {
  attn::mpi::sliding_window(x.q, x.k, x.v, x.out, comm, {.left = set.window, .right = set.window}, exec);
}

/// Features into the sums, out of the sums, and the triangles within chunks.
double sum_flops(const settings& set, double n) { return 2.0 * n * static_cast<double>(set.heads * set.dim * set.dim); }
double linear_flops(const settings& set, double n) {
  return 2 * sum_flops(set, n) + score_flops(set, n * (attn::detail::kernel_chunk + 1) / 2);
}
/// One state goes to the next process.
double state_bytes(const settings& set, double heads) {
  return heads * static_cast<double>(set.dim * (set.dim + 1)) * sizeof(float);
}
double scan_sent(const settings& set, double, double) { return state_bytes(set, static_cast<double>(set.kv_heads)); }
/// States pass from process to process, head by head. While the last one waits for the first of them it is not idle,
/// but as many heads as there are processes before it are summed up twice.
double scan(const settings& set, const network& net, double rate, double length, double machines) {
  const double part = length / machines, heads = static_cast<double>(set.heads), others = machines - 1;
  return (linear_flops(set, part) + std::min(others, heads) / heads * sum_flops(set, part)) / rate +
         others * net.seconds(state_bytes(set, 1));
}

void linear_alone(const settings&, const views& x, attn::execution& exec) {
  attn::linear(x.q, x.k, x.v, x.out, {.causal = true}, exec);
}
void linear_spread(const settings&, const views& x, MPI_Comm comm, attn::execution& exec) {
  attn::mpi::linear(x.q, x.k, x.v, x.out, comm, {.causal = true}, exec);
}

}  // namespace

const std::vector<entry>& operators() {
  static const std::vector<entry> all = {
      {.name = "full_softmax",
       .colour = "#1a1a1a",
       .flops = full_flops,
       .sent = ring_sent,
       .model = ring_full,
       .alone = full_alone<false>,
       .spread = full_spread<false, false>},
      {.name = "full_softmax_causal",
       .colour = "#7f7f7f",
       .flops = causal_flops,
       .sent = ring_sent,
       .model = ring_causal,
       .alone = full_alone<true>,
       .spread = full_spread<true, false>},
      {.name = "full_softmax_zigzag",
       .colour = "#d1344b",
       .flops = causal_flops,
       .sent = ring_sent,
       .model = ring_zigzag,
       .alone = full_alone<true>,
       .spread = full_spread<true, true>},
      {.name = "full_softmax_zigzag_backward",
       .colour = "#f2b134",
       .flops = backward_flops,
       .sent = backward_sent,
       .model = ring_backward,
       .alone = backward_alone,
       .spread = backward_spread},
      {.name = "sliding_window",
       .colour = "#1f77d0",
       .linear = true,
       .flops = window_flops,
       .sent = window_sent,
       .model = window_model,
       .alone = window_alone,
       .spread = window_spread},
      {.name = "linear_causal",
       .colour = "#2e8b3d",
       .linear = true,
       .flops = linear_flops,
       .sent = scan_sent,
       .model = scan,
       .alone = linear_alone,
       .spread = linear_spread},
  };
  return all;
}

}  // namespace bench::mpi
