// attn: the run of project, and of several projections of one sequence.
#pragma once

#include <attn/layers/detail/token_products.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// One of the projections of a sequence.
template <class P>
struct projection {
  linear_weight<P> weight;
  output_tokens<sum_type<P>> out;
};

template <class P>
void project_few_tokens(const input_tokens<sum_type<P>>& x, const projection<P>& p, execution& exec) {
  using T = sum_type<P>;
  auto [rows, packed] = exec.shared_scratch([&](arena& m) {
    return std::pair{row_buffer<T>(m, (std::min)(token_block, x.count), x.dim, width<T>), packed_tokens<P>(m, x.dim)};
  });
  for (idx_t first = 0; first < x.count; first += token_block) {
    const idx_t count = (std::min)(token_block, x.count - first);
    for (idx_t r = 0; r < count; ++r) x.load(first + r, rows.row(r));
    few_token_products<T, P>(
        rows, count, x.length, p.weight, packed, exec,
        [&](idx_t r, idx_t output, idx_t n, const T* values) { p.out.store(first + r, output, n, values); });
  }
}

/// Projections with their weights packed, block of tokens by block: of input(n), which are of one shape, or all of one.
template <class P, class Projection, class Input>
void project_many_tokens(std::span<const Projection> list, execution& exec, Input&& input) {
  using T = sum_type<P>;
  const idx_t count = input(0).count, dim = input(0).dim;
  const weight_panels<P>* const weights = exec.shared_scratch([&](arena& memory) {
    auto next = list.begin();
    return memory.allocate_list(std::ssize(list), [&](arena& m) { return weight_panels<P>(m, (next++)->weight); });
  });
  pack_weights<P>({weights, list.size()}, exec);
  idx_t widest = 0;
  for (const auto& p : list) widest = (std::max)(widest, p.weight.outputs);
  exec.for_each(ceil_div(count, token_block), [&](idx_t task, int worker) {
    const idx_t begin = task * token_block, rows = (std::min)(token_block, count - begin);
    auto [packed, sums] = exec.scratch(worker, [&](arena& memory) {
      return std::pair{packed_tokens<P>(memory, dim), row_buffer<T>(memory, token_block, widest, panel_width<T>)};
    });
    for (std::size_t n = 0; n < list.size(); ++n) {
      const input_tokens<T>& x = input(n);
      if (n == 0 || &x != &input(n - 1))
        packed.pack([&](idx_t r) { return x.at(begin + r); }, rows, x.strides[2], x.packing->template as<P>());
      multiply_tokens(packed, weights[n], 0, list[n].weight.outputs, sums);
      for (idx_t r = 0; r < rows; ++r) list[n].out.store(begin + r, sums.row(r));
    }
  });
}

/// Several projections of one sequence.
template <class P>
void run_projections(const input_tokens<sum_type<P>>& x, std::span<const projection<P>> list, execution& exec) {
  if (x.count == 0) return;
  double weights = 0;
  for (const auto& p : list) weights += static_cast<double>(p.weight.outputs) * static_cast<double>(x.dim);
  const auto limit = exec.limit_threads(
      {.operations = 2 * static_cast<double>(x.count) * weights, .bytes = double(sizeof(P)) / numbers_of<P> * weights});
  if (std::ranges::none_of(list, [&](const projection<P>& p) { return has_few_tokens(x, p.weight, exec); }))
    return project_many_tokens<P>(list, exec, [&](std::size_t) -> const auto& { return x; });
  for (const auto& p : list) project_few_tokens<P>(x, p, exec);
}

/// A head's part of a sequence, and its projection.
template <class P>
struct head_projection : projection<P> {
  input_tokens<sum_type<P>> x;
};

}}}  // namespace attn::ATTN_ISA::detail
