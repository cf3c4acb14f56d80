// attn: weights packed once, for any number of calls of the layers.
//
//   const attn::packed_weights<float> packed(w);                 // w [outputs, inputs]: an Eigen matrix, a tensor_view
//   attn::project(x, out, {.weight = packed, .bias = b});        // wherever a layer takes a weight
//   attn::packed_weights<Eigen::bfloat16> half_as_large(w);      // rounded, for calls with float too
//   attn::packed_weights<std::int8_t> small(w);                  // a quarter, with a scale for each output
//
// Layers pack the weights they are given in every call, but for sequences of up to eight tokens and rows or columns of
// stride 1. Packed weights are read as they are, by calls of any length, on any number of threads (512 to 1536 numbers,
// one thread of a Zen 4: 8 tokens take 113 us for 177, 16 tokens 245 for 315). They serve calls whose elements have
// their type, as caches do: of float elements also those of Eigen::half and Eigen::bfloat16, of all but double also
// std::int8_t. Sums are then those of the rounded weights. In eight bits weight [o, i] = scale[o] * code[o, i], codes
// being whole numbers from -127 to 127: an error of up to half of scale[o], 1/254 of the largest weight of the row.
// Where x is bf16 and the processor's products of bf16 are used, these are rounded to bf16 as well. Results with more
// than eight tokens are those of the weight itself, to the last bit, where it has the type Stored.
//
// They are a value: a copy has memory of its own. The weights of a layer point to them, so they must outlive those,
// stay where they are and be assigned nothing. Gradients need the weight itself: backward passes throw
// std::invalid_argument.
//
// Memory   bytes(): as many elements as the weight has, outputs rounded up to two vectors (32 floats with AVX-512) and
//          inputs in bf16 to a pair; in eight bits also a float for each output.
// Cost     packing reads the weight once, twice where numbers are rounded: for models that are loaded, not for calls.
// Throws   std::invalid_argument for a view without memory or of negative extents, for numbers that are too large for
//          16 bits (65504 in Eigen::half), and in eight bits for those that are not finite or beyond 1e38;
//          std::bad_alloc.
#pragma once

#include <attn/core/detail/pages.hpp>
#include <attn/layers/detail/token_products.hpp>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

template <class Stored>
stored_panel<Stored> panel_of(const packed_panels<compute_type<Stored>>& w, idx_t begin, idx_t k0) {
  using panel = stored_panel<Stored>;
  const idx_t depth = (std::min)(input_block, w.inputs - k0);
  return {static_cast<const typename panel::number*>(w.data) +
          panel::numbers(k0) * round_up(w.outputs, panel::wide) + begin * panel::numbers(depth)};
}

template <class Stored, class T = compute_type<Stored>>
void load_panel(const packed_panels<T>& w, idx_t begin, idx_t k, idx_t count, T* to) {
  constexpr idx_t wide = panel_width<T>, lanes = width<T>;
  const idx_t k0 = k / input_block * input_block;
  const stored_panel<Stored> panel = panel_of<Stored>(w, begin, k0);
  const packet<T> one = broadcast<T>(T(1));
  const packet<T> scales[] = {w.scales ? detail::load<T>(w.scales + begin) : one,
                              w.scales ? detail::load<T>(w.scales + begin + lanes) : one};
  for (idx_t i = 0; i < count; ++i)
    for (int half = 0; half < 2; ++half)
      detail::store<T>(to + i * wide + half * lanes, mul(panel.load(k - k0 + i, half * int(lanes)), scales[half]));
}

template <class Stored, class T = compute_type<Stored>>
void multiply_panels(const packed_panels<T>& w, const few_tokens_call<T>& call) {
  products_of_panels(call, [&w](idx_t begin, idx_t k0) { return panel_of<Stored>(w, begin, k0); }, w.scales);
}

}  // namespace detail

/// A weight [outputs, inputs], packed. A moved-from one may only be assigned to or destroyed.
template <class Stored>
class packed_weights {
  static_assert(element<Stored> || std::same_as<Stored, std::int8_t>,
                "attn: packed weights must be float, double, Eigen::half, Eigen::bfloat16 or std::int8_t");
  using T = compute_type<Stored>;
  using panel = detail::stored_panel<Stored>;
  using number = typename panel::number;

 public:
  using value_type = Stored;

  /// Of any strides, elements as T above: double for double, else float, Eigen::half or Eigen::bfloat16.
  template <viewable W>
    requires(!std::same_as<std::remove_cvref_t<W>, packed_weights>)
  explicit packed_weights(const W& w) {
    using S = element_of<const W&>;
    constexpr bool right = element<S> && std::same_as<compute_type<S>, T>;
    static_assert(right, "attn: packed weights of double are made of double, all others of float, Eigen::half or "
                         "Eigen::bfloat16");
    if constexpr (right) pack(view_field<const S, 2>(w));
  }

  packed_weights(const packed_weights& other)
      : panels_(other.panels_), numbers_(other.numbers_), scales_(other.scales_) {
    point();
  }
  packed_weights(packed_weights&& other) noexcept
      : panels_(other.panels_), numbers_(std::move(other.numbers_)), scales_(std::move(other.scales_)) {
    point();
  }
  packed_weights& operator=(packed_weights other) noexcept {
    panels_ = other.panels_;
    numbers_.swap(other.numbers_), scales_.swap(other.scales_);
    point();
    return *this;
  }

  idx_t outputs() const { return panels_.outputs; }
  idx_t inputs() const { return panels_.inputs; }
  /// Of the memory that this owns.
  std::size_t bytes() const { return numbers_.size() * sizeof(number) + scales_.size() * sizeof(T); }

  /// For layers.
  const detail::packed_panels<T>& panels() const { return panels_; }

 private:
  using storage = typename detail::packed_panels<T>::storage;
  static constexpr bool in_codes = std::same_as<Stored, std::int8_t>, in_pairs = panel::in_pairs;

  void point() {
    panels_.data = numbers_.data();
    panels_.scales = in_codes ? scales_.data() : nullptr;
  }

  template <class S>
  void pack(const tensor_view<const S, 2>& w) {
    const detail::validator check{"packed_weights"};
    check.readable("weight", w);
    const idx_t outputs = w.extent(0), inputs = w.extent(1), padded = detail::round_up(outputs, panel::wide);
    panels_ = {.outputs = outputs, .inputs = inputs,
               .stored = std::same_as<Stored, T> ? storage::numbers : in_pairs ? storage::pairs : storage::other,
               .load = detail::load_panel<Stored>, .multiply = detail::multiply_panels<Stored>};
    numbers_.resize(static_cast<std::size_t>(check.fits("packed weights", {padded, panel::numbers(inputs)})));
    if (in_codes) scales_.assign(static_cast<std::size_t>(padded), T(0));
    point();
    if constexpr (!std::same_as<Stored, T>) check_numbers(check, w);

    using P = std::conditional_t<in_pairs, detail::bf16_pair, T>;
    const detail::linear_weight<P> source(w, {});
    std::vector<P> buffer(static_cast<std::size_t>(panel::wide * (std::min)(detail::input_block, inputs)));
    for (idx_t o = 0; o < outputs; o += panel::wide)
      for (idx_t k0 = 0; k0 < inputs; k0 += detail::input_block) {
        const idx_t depth = (std::min)(detail::input_block, inputs - k0), count = (std::min)(panel::wide, outputs - o);
        number* const to = const_cast<number*>(detail::panel_of<Stored>(panels_, o, k0).data);
        if constexpr (std::same_as<P, number>) {
          source.pack(source, o, count, k0, depth, to);
        } else {
          source.pack(source, o, count, k0, depth, buffer.data());
          for (idx_t k = 0; k < depth; ++k)
            for (idx_t i = k * panel::wide; i < (k + 1) * panel::wide; ++i)
              to[i] = stored(buffer[static_cast<std::size_t>(i)], o + i % panel::wide);
        }
      }
  }

  /// That all numbers can be stored; in eight bits also the scales.
  template <class S>
  void check_numbers(const detail::validator& check, const tensor_view<const S, 2>& w) {
    constexpr T most = in_codes                               ? T(detail::quantised_most)
                       : std::same_as<Stored, Eigen::half>     ? T(65519)         // what rounds to 65504
                       : std::same_as<Stored, Eigen::bfloat16> ? T(0x1.fefffep127)
                                                               : (std::numeric_limits<T>::max)();
    const detail::any_rows<T> rows(w);
    std::vector<T> row(static_cast<std::size_t>(w.extent(1)));
    for (idx_t o = 0; o < w.extent(0); ++o) {
      rows.load(o, 0, w.extent(1), row.data());
      T largest = 0;
      for (const T x : row) {
        if (in_codes ? !(std::abs(x) <= most) : std::abs(x) > most && std::isfinite(x))
          check.fail(in_codes ? "numbers of up to 1e38" : "numbers that 16 bits hold", static_cast<double>(x));
        largest = (std::max)(largest, std::abs(x));
      }
      if (in_codes) scales_[static_cast<std::size_t>(o)] = largest / 127;
    }
  }

  Stored stored(T x, idx_t output) const {
    if constexpr (in_codes) {
      const T scale = scales_[static_cast<std::size_t>(output)];
      return static_cast<std::int8_t>(scale >= (std::numeric_limits<T>::min)() ? std::lrint(x / scale) : 0);
    } else {
      return static_cast<Stored>(x);
    }
  }

  detail::packed_panels<T> panels_;
  detail::memory_vector<number> numbers_;
  detail::memory_vector<T> scales_;
};

}}  // namespace attn::ATTN_ISA
