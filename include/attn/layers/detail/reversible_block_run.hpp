// attn: a call of reversible_block or its inverse, its checks and its run.
#pragma once

#include <attn/layers/detail/sequence.hpp>

#include <tuple>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct reversible_block_options;

namespace detail {

/// value + rest = value + rest + change, where rest receives what does not fit in the digits of value.
template <class S>
void add_with_rest(S& value, S& rest, compute_type<S> change) {
  if constexpr (std::same_as<S, double>) {
    const auto two_sum = [](double a, double b) {  // Knuth: a + b = sum + error
      const double sum = a + b, part = sum - a;
      return std::pair{sum, (a - (sum - part)) + (b - part)};
    };
    const auto [sum, error] = two_sum(value, change);
    std::tie(value, rest) = two_sum(sum, error + rest);
  } else {
    using wide = std::conditional_t<std::same_as<S, float>, double, float>;
    const wide sum = static_cast<wide>(value) + static_cast<wide>(rest) + static_cast<wide>(change);
    value = static_cast<S>(sum);
    rest = static_cast<S>(sum - static_cast<wide>(value));
  }
}

/// to = from + sign * change, number by number, with a remainder where one is given.
template <class S>
void add_change(const tensor_view<const S, 3>& from, const tensor_view<S, 3>& change, compute_type<S> sign,
                const tensor_view<S, 3>& to, const tensor_view<S, 3>& remainder, execution& exec) {
  using T = compute_type<S>;
  const idx_t length = from.extent(1), dim = from.extent(2), rows = from.extent(0) * length;
  if (from.empty()) return;
  const auto row = [&](const auto& x, idx_t n) {
    return x.data() + n / length * x.stride(0) + n % length * x.stride(1);
  };
  const auto limit = exec.limit_threads(
      {.bytes = (remainder ? 5.0 : 3.0) * sizeof(S) * static_cast<double>(rows) * static_cast<double>(dim)});
  exec.for_each(ceil_div(rows, tokens_per_task), [&](idx_t task, int) {
    const idx_t x_stride = from.stride(2), out_stride = to.stride(2), rest_stride = remainder.stride(2);
    for (idx_t n = task * tokens_per_task; n < (std::min)((task + 1) * tokens_per_task, rows); ++n) {
      const S *const a = row(from, n), *const b = row(change, n);
      S* const out = row(to, n);
      if (remainder) {
        S* const r = row(remainder, n);
        for (idx_t d = 0; d < dim; ++d) {
          S value = a[d * x_stride];
          add_with_rest<S>(value, r[d * rest_stride], sign * static_cast<T>(b[d]));
          out[d * out_stride] = value;
        }
      } else {
        for (idx_t d = 0; d < dim; ++d)
          out[d * out_stride] = static_cast<S>(static_cast<T>(a[d * x_stride]) + sign * static_cast<T>(b[d]));
      }
    }
  });
}

/// Forward, or with sign -1 back: the first half (back: the second) changes by what `change_first` makes of the other
/// half, then the other half by what `change_second` makes of the changed one.
template <class S, class First, class Second>
void run_reversible(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out, const tensor_view<S, 3>& remainder,
                    int sign, First& change_first, Second& change_second, execution& exec) {
  const idx_t dim = x.extent(2) / 2, first = sign < 0;
  const auto half = [&](const auto& whole, idx_t which) { return whole.slice(2, which * dim, dim); };
  const auto change =
      exec.workspace([&](arena& memory) { return allocate_sequence<S>(memory, x.extent(0), x.extent(1), dim); });
  const auto add = [&](idx_t which) {
    const auto rest = remainder ? half(remainder, which) : remainder;
    add_change<S>(half(x, which), *change, static_cast<compute_type<S>>(sign), half(out, which), rest, exec);
  };
  change_first(half(x, 1 - first), *change, exec);
  add(first);
  change_second(tensor_view<const S, 3>(half(out, first)), *change, exec);
  add(1 - first);
}

/// The block, or its inverse, by `name`.
template <class X, class O, class F, class G, class Options>
void reversible(const char* name, int sign, const X& x, O& out, F& f, G& g, Options& options, execution_ref& exec) {
  using S = element_of<const X&>;
  static_assert(token_mixer<F, S> && token_mixer<G, S>, "attn: f and g must be callable as f(x, out, execution)");
  const auto [from, to] = sequences_of(x, out);
  const tensor_view<S, 3> remainder = options_or_default<reversible_block_options<S>>(options).remainder;
  const idx_t dim = from.extent(2);
  layer_views check{name, from, to};
  check.update("remainder", remainder);
  if (dim % 2 != 0) check.fail("an even width", dim);
  check.out_dim(dim);
  if (remainder)
    check.extents({{"remainder batch = x batch", from.extent(0), remainder.extent(0)},
                   {"remainder length = x length", from.extent(1), remainder.extent(1)},
                   {"remainder dim = x dim", dim, remainder.extent(2)}});
  check.fits("x", {from.extent(0), from.extent(1), dim});
  run_reversible<S>(from, to, remainder, sign, f, g, execution_of(exec, options));
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
