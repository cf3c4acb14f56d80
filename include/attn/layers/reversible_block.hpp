// attn: the reversible residual block: its input can be had back from its output, so nothing need be kept of a stack.
//
//   y1 = x1 + f(x2),  y2 = x2 + g(y1);   back:  x2 = y2 - g(y1),  x1 = y1 - f(x2)
//                                        Gomez et al. 2017, "The reversible residual network"; Kitaev et al. 2020
//
//   attn::reversible_block(x, out, f, g, {}, threads);            // out may be x: a stack needs one sequence
//   attn::reversible_block_inverse(out, x, f, g, {}, threads);
//   attn::reversible_block(x, x, f, g, {.remainder = r});         // float, double: nothing is lost in deep stacks
//
// Shapes   x and out [B, L, 2 D]: x1 and x2 side by side. float, double, Eigen::half or Eigen::bfloat16.
// Mixers   f(x, out, execution) and g likewise, with views [B, L, D]; each fills out. They must give the same result
//          for the same input: every operator of this library does, for any number of threads.
// Cost     that of f and g. Scratch, beside theirs: half a sequence.
// Exact    but for the rounding of the sums: one block and its inverse return x to about a unit in the last place of
//          the larger of x and y. On the way back through a stack, the functions of earlier blocks magnify what later
//          ones lost, as far as they are steep: 24 layers of random attention and tanh came back to 5e-7 in float where
//          weights have gain 0.25, to 4e-6 with gain 0.5, to 1e-4 with gain 1. With a remainder all of them came back
//          to the last bit, and so did 400 layers; in double, 200. 16-bit types come nearer, not back: with gain 0.5
//          Eigen::half to 2e-4 instead of 2e-2, Eigen::bfloat16 to 3e-2 instead of 0.2.
// Throws   std::invalid_argument for shapes that do not fit, an odd width among them, before anything is written; what
//          f or g throws passes through. If the second of them throws, half of out, and of the remainder, is already
//          written: in place, that half of x is lost.
#pragma once

#include <attn/layers/detail/sequence.hpp>

#include <tuple>

namespace attn::inline ATTN_ISA {

/// Options of reversible_block and its inverse for elements of type S.
template <class S>
struct reversible_block_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  /// What rounding has taken from every sum so far, [B, L, 2 D]: zeros before the first block, changed by every block
  /// and every inverse.
  tensor_view<S, 3> remainder{};
};

namespace detail {

/// value + rest = value + rest + change, where rest takes what value has no digits for.
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

/// to = from + sign * change, number by number, with a remainder where one is given; tokens fall to tasks.
template <class S>
void add_change(const tensor_view<const S, 3>& from, const tensor_view<S, 3>& change, compute_type<S> sign,
                const tensor_view<S, 3>& to, const tensor_view<S, 3>& remainder, execution& exec) {
  using T = compute_type<S>;
  constexpr index step = 64;
  const index rows = tokens(from);
  exec.for_each((rows + step - 1) / step, [&](index task, int) {
    for (index n = task * step; n < std::min((task + 1) * step, rows); ++n) {
      const S *const a = token(from, n), *const c = token(change, n);
      S* const out = token(to, n);
      const index in_stride = from.stride(2), out_stride = to.stride(2);
      if (remainder) {
        S* const rest = token(remainder, n);
        for (index d = 0; d < from.extent(2); ++d) {
          S value = a[d * in_stride];
          add_with_rest<S>(value, rest[d * remainder.stride(2)], sign * static_cast<T>(c[d]));
          out[d * out_stride] = value;
        }
      } else {
        for (index d = 0; d < from.extent(2); ++d)
          out[d * out_stride] = static_cast<S>(static_cast<T>(a[d * in_stride]) + sign * static_cast<T>(c[d]));
      }
    }
  });
}

/// Forward, or with sign -1 back: the half `first` changes by what `change_first` makes of the other half, then the
/// other half by what `change_second` makes of the changed one.
template <class S, class First, class Second>
void run_reversible(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out, const tensor_view<S, 3>& remainder,
                    int first, compute_type<S> sign, First& change_first, Second& change_second, execution& exec) {
  const index dim = x.extent(2) / 2;
  const auto half = [&](const auto& whole, int which) { return whole.slice(2, which * dim, dim); };
  const auto change = exec.workspace([&](arena& memory) {
    return tensor_view<S, 3>(memory.allocate<S>(x.size() / 2), {x.extent(0), x.extent(1), dim});
  });
  const auto add = [&](int which) {
    add_change<S>(half(x, which), *change, sign, half(out, which), remainder ? half(remainder, which) : remainder,
                  exec);
  };
  change_first(half(x, 1 - first), *change, exec);
  add(first);
  change_second(tensor_view<const S, 3>(half(out, first)), *change, exec);
  add(1 - first);
}

template <class S>
void check_reversible(const validator& check, const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                      const tensor_view<S, 3>& remainder) {
  if (x.extent(2) % 2 != 0) check.fail("an even width", x.extent(2));
  check_sequences(check, x, out, x.extent(2));
  check_in_place(check, x, out);
  if (remainder) {
    check.writable("remainder", remainder);
    check.equal("remainder batch = x batch", x.extent(0), remainder.extent(0));
    check.equal("remainder length = x length", x.extent(1), remainder.extent(1));
    check.equal("remainder dim = x dim", x.extent(2), remainder.extent(2));
    check.no_alias("remainder", remainder, "x", x);
    check.no_alias("remainder", remainder, "out", out);
  }
  check.fits("x", {x.extent(0), x.extent(1), x.extent(2)});
}

template <class S, class F, class G>
constexpr void require_mixers() {
  static_assert(sequence_function<std::remove_reference_t<F>, S> && sequence_function<std::remove_reference_t<G>, S>,
                "attn: f and g must be callable as f(x, out, execution)");
}

}  // namespace detail

/// Forward, by an execution, which may be left out. See the top of the file.
template <viewable X, viewable O, class F, class G>
void reversible_block(const X& x, O&& out, F&& f, G&& g, const reversible_block_options<element_of<const X&>>& options,
                      execution& exec) {
  detail::require_sequences<const X&, O>();
  using S = element_of<const X&>;
  detail::require_mixers<S, F, G>();
  const tensor_view<const S, 3> from = as_sequence(x);
  const tensor_view<S, 3> to = as_sequence(out);
  detail::check_reversible<S>(detail::validator("reversible_block"), from, to, options.remainder);
  detail::run_reversible<S>(from, to, options.remainder, 0, 1, f, g, exec);
}

template <viewable X, viewable O, class F, class G>
void reversible_block(const X& x, O&& out, F&& f, G&& g,
                      const reversible_block_options<element_of<const X&>>& options = {}) {
  execution serial;
  reversible_block(x, out, f, g, options, serial);
}

/// Back: x from what reversible_block made of it, with the same f and g and the remainder it left.
template <viewable Y, viewable O, class F, class G>
void reversible_block_inverse(const Y& y, O&& out, F&& f, G&& g,
                              const reversible_block_options<element_of<const Y&>>& options, execution& exec) {
  detail::require_sequences<const Y&, O>();
  using S = element_of<const Y&>;
  detail::require_mixers<S, F, G>();
  const tensor_view<const S, 3> from = as_sequence(y);
  const tensor_view<S, 3> to = as_sequence(out);
  detail::check_reversible<S>(detail::validator("reversible_block_inverse"), from, to, options.remainder);
  detail::run_reversible<S>(from, to, options.remainder, 1, -1, g, f, exec);
}

template <viewable Y, viewable O, class F, class G>
void reversible_block_inverse(const Y& y, O&& out, F&& f, G&& g,
                              const reversible_block_options<element_of<const Y&>>& options = {}) {
  execution serial;
  reversible_block_inverse(y, out, f, g, options, serial);
}

}  // namespace attn
