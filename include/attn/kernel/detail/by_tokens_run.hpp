// attn: whole calls of a recurrence token by token, as its steps compute them (execution::set_invariant): a chunk has
// sums of its own, which no step can have.
#pragma once

#include <attn/kernel/detail/recurrence_run.hpp>
#include <attn/kernel/detail/state_feed.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// steps(call, first) with states of this call's own, which begin as its options say.
template <rule R, class T, class Steps>
void run_by_tokens(kernel_call<T> call, execution& exec, Steps&& steps) {
  using ring = typename item_memory<T>::ring;
  const recurrence_parameters<T>& given = call.recurrence;
  const idx_t batch = call.shape.batch, size = call.heads * call.sums_size() + round_up(call.heads, 16);
  struct memory {
    T* states;
    ring* rings;
    idx_t* tokens;
  };
  const auto own = exec.workspace([&](arena& m) {
    return memory{m.allocate<T>(batch * size), m.allocate<ring>(batch), m.allocate<idx_t>(batch)};
  });
  std::fill_n(own->rings, batch, ring{});
  std::fill_n(own->tokens, batch, idx_t(0));
  call.state = {own->states, own->rings, own->tokens, size, 0};
  const auto each_head = [&](auto&& visit) {
    for (idx_t n = 0; n < batch * call.heads; ++n)
      visit(n / call.heads, n % call.heads, call.state_sums(n / call.heads, n % call.heads));
  };
  each_head([&](idx_t b, idx_t h, kernel_sums<T> sums) {
    sums.clear();
    if (given.initial_state || given.initial_weights)
      load_state(call, given.initial_state, given.initial_weights, b, h, call.shape.dim_v,
                 {sums.values, sums.rows()}, sums.weights, 1);
    if (!reads_state<R>) call.decay_at(call.state.at(b), h) = T(1);
  });
  steps(call, sequence_lengths{});
  if (!given.final_state && !given.final_weights) return;
  const recurrence_driver<R, T> driver{call};
  each_head([&](idx_t b, idx_t h, const kernel_sums<T>& sums) {
    driver.end(b, h, {{sums.values, sums.rows()}, sums.weights, false}, 0, call.shape.dim_v);
  });
}

}}}  // namespace attn::ATTN_ISA::detail
