// attn: how the tokens of a step are fed to a state, all at once or, where they are few, one by one; and whole calls of
// a recurrence token by token, as its steps compute them (execution::set_invariant): a chunk has sums of its own, which
// no step can have.
#pragma once

#include <attn/kernel/detail/kernel_items.hpp>
#include <attn/kernel/detail/recurrence_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Feeds the tokens of a checked call: at_once(call of some of them), one_by_one(from which token on). All of them one
/// by one where the execution is invariant.
template <class T, class AtOnce, class OneByOne>
void feed_state(kernel_call<T>& call, kernel_items<T>& state, const work_estimate& work, execution& exec,
                AtOnce&& at_once, OneByOne&& one_by_one) {
  call.state = state.items();
  const auto limit = exec.limit_threads(work);
  state.feed(
      call.lengths,
      [&](const sequence_lengths& first) {
        kernel_call<T> some = call;
        some.lengths = first;
        at_once(some);
      },
      one_by_one, exec.invariant() ? (std::numeric_limits<idx_t>::max)() : few_tokens);
}

/// Token t of head h of batch item b.
struct step_token {
  idx_t b, h, t;
};

/// The tokens of each batch item from first.keys(b) on, in their order: step(tokens, count, scratch) computes one of
/// each of up to `most` heads at a time, with what layout(arena&) makes of the scratch memory. Clears the padding.
template <class T, class Layout, class Step>
void each_step(const kernel_call<T>& call, const sequence_lengths& first, idx_t most, execution& exec, Layout&& layout,
               Step&& step) {
  const idx_t item_heads = call.shape.batch * call.heads;
  exec.for_each((item_heads + most - 1) / most, [&](idx_t task, int worker) {
    step_token* tokens = nullptr;
    const auto scratch = exec.scratch(worker, [&](arena& memory) {
      tokens = memory.allocate<step_token>(most);
      return layout(memory);
    });
    const idx_t begin = task * most, end = (std::min)(begin + most, item_heads);
    idx_t count = 0;
    for (idx_t item_head = begin; item_head < end; ++item_head) {
      const idx_t b = item_head / call.heads, h = item_head % call.heads;
      if (first.keys(b) < call.lengths.keys(b)) tokens[count++] = {b, h, first.keys(b)};
      if (call.lengths.queries(b) < call.shape.queries) call.pad(b, h);
    }
    while (count > 0) {
      step(tokens, count, scratch);
      const step_token* const all = tokens + count;
      count = 0;
      for (const step_token* at = tokens; at != all; ++at)
        if (at->t + 1 < call.lengths.keys(at->b)) tokens[count++] = {at->b, at->h, at->t + 1};
    }
  });
}

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
