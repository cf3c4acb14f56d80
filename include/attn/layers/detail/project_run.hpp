// attn: the run of project, and of several projections of one sequence.
#pragma once

#include <attn/layers/detail/token_products.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct project_weights;

namespace detail {

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

/// What a head of a projection reads and writes.
template <class T>
tensor_view<T, 3> head_of_tokens(const tensor_view<T, 3>& x, idx_t h, idx_t dim) {
  return x ? x.slice(2, h * dim, dim) : x;
}
template <class T>
tensor_view<T, 1> head_of_list(const tensor_view<T, 1>& x, idx_t h, idx_t dim) {
  return x ? x.slice(0, h * dim, dim) : x;
}
/// `products` of every token with every number of the weights.
template <class S>
work_estimate work_of_heads(const tensor_view<const S, 3>& x, const tensor_view<const S, 3>& weight, double products) {
  const double numbers = static_cast<double>(weight.size());
  return {.operations = 2 * products * static_cast<double>(x.extent(0) * x.extent(1)) * numbers,
          .bytes = products * sizeof(S) * numbers};
}

/// With one matrix: what other layers call.
template <class S>
void run_project(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out, const project_weights<S>& w,
                 execution& exec) {
  with_products<S>(exec, [&]<class P>(std::type_identity<P>) {
    const projection<P> one{{w.weight, w.bias}, out};
    run_projections<P>(x, {&one, 1}, exec);
  });
}

template <class S>
void run_project_per_head(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out, const project_weights<S>& w,
                          execution& exec) {
  const tensor_view<const S, 3>& all = w.weight.per_head();
  const idx_t heads = all.extent(0);
  if (heads == 0 || x.extent(0) * x.extent(1) == 0) return;
  const auto limit = exec.limit_threads(work_of_heads<S>(x, all, 1));
  with_products<S>(exec, [&]<class P>(std::type_identity<P>) {
    const auto list = exec.workspace([&](arena& memory) {
      idx_t h = -1;
      return memory.allocate_list(heads, [&](arena&) {
        ++h;
        return head_projection<P>{{{w.weight.head(h), head_of_list<const S>(w.bias, h, all.extent(1))},
                                   head_of_tokens(out, h, all.extent(1))},
                                  head_of_tokens(x, h, all.extent(2))};
      });
    });
    // All heads of a block of tokens together, which are adjacent in memory.
    const std::span<const head_projection<P>> parts(*list, static_cast<std::size_t>(heads));
    if (!has_few_tokens(parts[0].x, parts[0].weight, exec))
      return project_many_tokens<P>(parts, exec, [&](std::size_t n) -> const auto& { return parts[n].x; });
    for_each_head(heads, exec.active_threads(), exec, [&](idx_t h, execution& e) {
      const projection<P>& one = (*list)[h];
      run_projections<P>((*list)[h].x, {&one, 1}, e);
    });
  });
}

/// The checks of a weight, or of one for each head.
template <class S>
void check_project(layer_views& check, const project_weights<S>& w) {
  const tensor_view<const S, 3>& all = w.weight.per_head();
  const idx_t dim = check.x.extents[2];
  if (!all) {
    check.linear("weight", w.weight, "bias", w.bias, dim);
    return check.out_dim(w.weight.extent(0), " = weight rows");
  }
  check.read("weight", all);
  const idx_t outputs = check.fits("heads * outputs", {all.extent(0), all.extent(1)});
  if (check.fits("heads * inputs", {all.extent(0), all.extent(2)}) != dim)
    check.fail({"weight [heads, outputs, inputs] with heads x inputs = x dim ", dim},
               error_text::list(all.extents().data(), 3));
  check.fits("a packed weight", {round_up(all.extent(1), panel_width<float>), all.extent(2)});
  check.list("bias", w.bias, "output of all heads", outputs);
  check.out_dim(outputs, " = heads x outputs of weight");
}

template <class S>
[[gnu::noinline]] void call_project(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                                    const project_weights<S>& w, execution& exec) {
  layer_views check{"project", x, out, false};
  check_project<S>(check, w);
  w.weight.per_head() ? run_project_per_head<S>(x, out, w, exec) : run_project<S>(x, out, w, exec);
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
