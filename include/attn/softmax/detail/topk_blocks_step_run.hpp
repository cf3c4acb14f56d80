// attn: the driver of topk_blocks_step.
#pragma once

#include <attn/softmax/detail/summarised_tokens.hpp>
#include <attn/softmax/detail/stream_driver.hpp>
#include <attn/softmax/detail/topk_blocks_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The inside of topk_blocks_cache.
template <class S>
using topk_tokens = summarised_tokens<S, block_sums>;

/// The plan of a few queries of a call whose keys are those of a cache.
template <class S, class Score>
struct topk_step : stream_plan<S, Score> {
  using base = stream_plan<S, Score>;
  using base::in, base::shape;

  const topk_tokens<S>& cache;
  const topk_shape& blocks;
  const topk_names<S>& others;  // those of the items that this plan leaves

  bool takes(idx_t b, idx_t) const { return others.streamed(b); }

  idx_t seen() const { return (std::min)((blocks.rounds + 1) * blocks.block, shape.keys) + blocks.blocks / 2; }
  double read() const {
    return static_cast<double>(shape.group() * shape.queries) *
           static_cast<double>(seen() - blocks.blocks / 2);
  }
  using scratch = block_chooser<compute_type<S>>;
  scratch layout(arena& memory) const { return scratch::layout(memory, shape.dim, blocks.rounds); }

  template <class Take>
  void rows(idx_t b, idx_t h, idx_t i, const scratch& chooser, const Take& take) const {
    const idx_t position = this->position(b, i), own = blocks.block_of(position) * blocks.block;
    if (position < 0) return;
    const idx_t key_head = b * shape.kv_heads + h / shape.group();
    const block_sums<const compute_type<S>> sums{cache.sums() + key_head * cache.sums_stride(), shape.dim};
    if (blocks.rounds > 0) chooser.choose(in.query(b, h), i, 1, position, blocks, sums);
    const auto take_keys = [&](idx_t begin, idx_t end) {
      for (idx_t to; begin < end; begin = to) {
        to = (std::min)(begin + stream_chunk, end);
        take(in.key(b, h), in.value(b, h), index_map{}, begin, to, 0);
      }
    };
    for (idx_t r = 0; r < blocks.choices(position); ++r)
      take_keys(chooser.chosen[r] * blocks.block, (chooser.chosen[r] + 1) * blocks.block);
    take_keys(own, position + 1);
  }
};

template <class S, class Score>
void run_topk_blocks_step(const softmax_call<S, Score>& call, const topk_tokens<S>& cache, idx_t topk) {
  const topk_shape blocks(call.shape.keys, cache.block(), topk);
  const auto plan = topk_plan_of(call, blocks, cache.sums(), cache.sums_stride(), cache.block(), topk);
  idx_t streamed = 0;
  for (idx_t b = 0; b < call.shape.batch; ++b) streamed += plan.streamed(b);
  // The plan sets rows of items that it leaves to zero, so it goes first.
  if (streamed < call.shape.batch) run_plan(call, plan);
  if (streamed > 0) attend_streamed(call, topk_step<S, Score>{{call}, cache, blocks, plan});
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_topk_blocks_step(const softmax_call<S, no_score>&, const topk_tokens<S>&, idx_t)
#include <attn/core/detail/compiled.hpp>
