// attn: how the tokens of a step are fed to a state: all at once, or one by one where they are few.
#pragma once

#include <attn/kernel/detail/kernel_call.hpp>
#include <attn/kernel/detail/kernel_items.hpp>

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

}}}  // namespace attn::ATTN_ISA::detail
