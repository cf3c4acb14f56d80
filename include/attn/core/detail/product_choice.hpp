// attn: the operand type of an operator's products, by its element type and the precision asked for.
#pragma once

#include <attn/core/detail/tile_product.hpp>
#include <attn/core/execution.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The operands of products of elements of type S for precision::fast: those of product_type where nothing is faster.
template <class S>
using fast_product_type = std::conditional_t<
    std::same_as<S, float> && matrix_unit_compiled, split_pair,
    std::conditional_t<std::same_as<S, Eigen::half> && bf16_products != bf16_make::none, bf16_pair, product_type<S>>>;

/// Whether `fast` differs from `standard` for elements of type S in this build and on this processor.
template <class S>
bool has_fast_products() {
#if ATTN_HAS_AMX
  if constexpr (std::same_as<S, float>) return amx::available();
#endif
  return !std::same_as<fast_product_type<S>, product_type<S>>;
}

/// Whether products of a call by `exec` differ from the standard ones.
template <class S>
bool uses_fast_products(const execution& exec) {
  return exec.precision() == precision::fast && has_fast_products<S>();
}

/// While this object lives, products of calls by `exec` are standard ones.
class standard_products {
 public:
  explicit standard_products(execution& exec) : exec_(exec), before_(exec.precision()) {
    exec.set_precision(precision::standard);
  }
  ~standard_products() { exec_.set_precision(before_); }
  standard_products(const standard_products&) = delete;
  standard_products& operator=(const standard_products&) = delete;

 private:
  execution& exec_;
  precision before_;
};

/// body(type_identity<P>()) with the operands P of a call by `exec`.
template <class S, class Body>
void with_products(const execution& exec, Body&& body) {
  if constexpr (!std::same_as<fast_product_type<S>, product_type<S>>)
    if (uses_fast_products<S>(exec)) return body(std::type_identity<fast_product_type<S>>());
  body(std::type_identity<product_type<S>>());
}

}}}  // namespace attn::ATTN_ISA::detail
