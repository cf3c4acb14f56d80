// attn: a call of mean_pool, its checks and its run.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/key_flags.hpp>
#include <attn/layers/detail/sequence.hpp>

#include <tuple>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The view [1, batch, dim] of a matrix [batch, dim].
template <viewable X>
constexpr auto as_rows(X&& x) {
  if constexpr (gives_view<X>) {
    return as_rows(x.view());
  } else if constexpr (is_view<std::remove_cvref_t<X>>) {
    using object = std::remove_cvref_t<X>;
    static_assert(object::rank == 2, "attn: the means must be [batch, dim]");
    return tensor_view<typename object::element_type, 3>(x.data(), {1, x.extent(0), x.extent(1)},
                                                         {0, x.stride(0), x.stride(1)});
  } else {
    return as_sequence(x);
  }
}

/// Which tokens are taken.
struct pool_choice {
  std::span<const idx_t> lengths;
  key_flags mask;
  idx_t length;

  idx_t end(idx_t b) const { return lengths.empty() ? length : lengths[static_cast<std::size_t>(b)]; }
  bool takes(idx_t b, idx_t i) const {
    return i < end(b) && !mask.hides(b, i);
  }
  idx_t count(idx_t b) const { return mask.count(b, 0, end(b)); }
};

/// Checks the sequence, the means and the choice of tokens.
[[gnu::noinline]] inline void check_pool(call_views& check, const memory_layout& x, const char* name,
                                         const memory_layout& means, const pool_choice& tokens) {
  const idx_t batch = x.extents[0], length = x.extents[1];
  check.equal(name, batch, means.extents[1]);
  check.equal("dim of the means = x dim", x.extents[2], means.extents[2]);
  check_length_list(check, "lengths", tokens.lengths, batch, length);
  check.option("mask", tokens.mask.mask, {{"mask batch", batch, or_one}, {}, {}, {"mask length = x length", length}});
  check.fits("x", {batch, length, std::max<idx_t>(x.extents[2], 1)});
}

/// body(b, first, count) for every part of 256 numbers of the tokens of every item.
template <class Body>
void for_each_pool(const memory_layout& x, execution& exec, Body&& body) {
  constexpr idx_t numbers = 256;
  const idx_t parts = ceil_div(x.extents[2], numbers);
  const double all = static_cast<double>(x.extents[0]) * static_cast<double>(x.extents[1] * x.extents[2]);
  const auto limit = exec.limit_threads({.bytes = all * static_cast<double>(x.item)});
  exec.for_each(x.extents[0] * parts, [&](idx_t task, int worker) {
    const idx_t first = task % parts * numbers;
    body(task / parts, first, (std::min)(numbers, x.extents[2] - first), worker);
  });
}

template <class S>
[[gnu::noinline]] void call_mean_pool(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                                      const pool_choice& tokens, execution& exec) {
  using T = compute_type<S>;
  call_views check{"mean_pool"};
  check.read("x", x);
  check.write("out", out);
  check_pool(check, x, "out rows = x batch", out, tokens);
  const input_tokens<T> from(x);
  const output_tokens<T> to(out);
  for_each_pool(x, exec, [&](idx_t b, idx_t first, idx_t count, int worker) {
    const auto [total, some, row] = exec.scratch(worker, [&](arena& memory) {
      double* const sums = memory.allocate<double>(count);
      return std::tuple{sums, memory.allocate<T>(count), memory.allocate<T>(count)};
    });
    std::fill_n(total, count, 0.0);
    for (idx_t begin = 0; begin < tokens.end(b); begin += tokens_per_task) {
      std::fill_n(some, count, T(0));
      for (idx_t i = begin; i < (std::min)(begin + tokens_per_task, tokens.end(b)); ++i) {
        if (!tokens.takes(b, i)) continue;
        from.any_rows<T>::load(b * from.length + i, first, count, row);
        for (idx_t d = 0; d < count; ++d) some[d] += row[d];
      }
      for (idx_t d = 0; d < count; ++d) total[d] += static_cast<double>(some[d]);
    }
    const double n = static_cast<double>(std::max<idx_t>(tokens.count(b), 1));
    for (idx_t d = 0; d < count; ++d) row[d] = static_cast<T>(total[d] / n);
    to.store(b, first, count, row);
  });
}

}}}  // namespace attn::ATTN_ISA::detail
