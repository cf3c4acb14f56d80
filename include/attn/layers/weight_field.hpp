// attn: the weights of layers as fields of their structures: views, or weights packed before the call.
//
//   attn::project(x, out, {.weight = w});           // w: an Eigen matrix, a tensor_view, an attn::packed_weights
//
// A weight_field is a view_field of a matrix. Made of packed weights it has their extents and no memory, and points to
// them: they must outlive it, and stay where they are.
#pragma once

#include <attn/core/view_field.hpp>
#include <attn/layers/detail/few_token_kernels.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Weights packed once, for any number of calls: packed_weights.hpp.
template <class Stored>
class packed_weights;

namespace detail {

/// Packed weights of any storage: blocks of input_block inputs, each as panels of panel_width outputs, [input][output],
/// in bf16 as pairs of inputs. The functions are compiled where weights are packed.
template <class T>
struct packed_panels {
  enum class storage { numbers, pairs, other };

  idx_t outputs = 0, inputs = 0;
  const void* data = nullptr;
  const T* scales = nullptr;  // of the outputs, in eight bits
  storage stored = storage::other;
  /// Inputs [k, k + count), of one block, for the panel of outputs from `begin` on, as numbers [input][panel_width].
  void (*load)(const packed_panels&, idx_t begin, idx_t k, idx_t count, T* to) = nullptr;
  void (*multiply)(const packed_panels&, const few_tokens_call<T>& call) = nullptr;

  /// All panels as operands P, if they are stored as such.
  template <class P>
  const P* as() const {
    constexpr bool of_numbers = std::same_as<P, T>, of_pairs = std::same_as<P, bf16_pair>;
    const bool same = (of_numbers && stored == storage::numbers) || (of_pairs && stored == storage::pairs);
    return same ? static_cast<const P*>(data) : nullptr;
  }
};

/// Whether weights stored as Stored serve calls whose elements are S, as caches serve them.
template <class Stored, class S>
inline constexpr bool stores_for = std::same_as<Stored, S> || (std::same_as<S, float> && sizeof(Stored) == 2) ||
                                   (!std::same_as<S, double> && std::same_as<Stored, std::int8_t>);

template <class>
inline constexpr bool is_packed = false;
template <class Stored>
inline constexpr bool is_packed<packed_weights<Stored>> = true;

}  // namespace detail

/// A weight [outputs, inputs] of a layer whose elements are S.
template <class S>
class weight_field : public view_field<const S, 2> {
  using base = view_field<const S, 2>;
  using panels = detail::packed_panels<compute_type<S>>;

 public:
  using base::base;
  constexpr weight_field() = default;
  constexpr weight_field(const base& x) : base(x) {}
  template <class X>
    requires(!std::same_as<std::remove_cvref_t<X>, weight_field> && !std::same_as<std::remove_cvref_t<X>, base>)
  constexpr weight_field(X&& x) : base(view_of<X>(x)), packed_(panels_of<X>(x)) {}

  /// Null where this is a view.
  constexpr const panels* packed() const { return packed_; }

 private:
  template <class X>
  static constexpr base view_of(std::remove_reference_t<X>& x) {
    if constexpr (detail::is_packed<std::remove_cvref_t<X>>) return base(nullptr, {x.outputs(), x.inputs()});
    else return base(static_cast<X&&>(x));
  }
  template <class X>
  static constexpr const panels* panels_of([[maybe_unused]] std::remove_reference_t<X>& x) {
    using given = std::remove_cvref_t<X>;
    if constexpr (detail::is_packed<given>) {
      constexpr bool stays = std::is_reference_v<X>;
      static_assert(stays, "attn: a temporary is gone before it is read: name the packed weights");
      constexpr bool serves = detail::stores_for<typename given::value_type, S>;
      static_assert(serves, "attn: packed weights must be of the element type of the call; for float also Eigen::half "
                            "or Eigen::bfloat16; for all but double also std::int8_t");
      if constexpr (stays && serves) return &x.panels();
      else return nullptr;
    } else {
      return nullptr;
    }
  }

  const panels* packed_ = nullptr;
};

}}  // namespace attn::ATTN_ISA
