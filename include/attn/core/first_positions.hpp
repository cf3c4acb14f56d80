// attn: where the queries of a call are among the tokens: one position for all batch items, or one for each.
//
//   attn::full_softmax(q, k, v, out, {.causal = true, .first_position = 4096, .span = 4});
//   std::vector<attn::idx_t> first = {4096, 100};                                      // named: the call reads it
//   attn::full_softmax(q, k, v, out, {.causal = true, .first_position = first, .span = 4});
#pragma once

#include <attn/core/tensor_view.hpp>

#include <optional>

namespace attn { inline namespace ATTN_ISA {

/// Query i of batch item b is at position i + of(b); none unless given.
class first_positions {
 public:
  constexpr first_positions() = default;
  constexpr first_positions(idx_t of_all) : one_(of_all), given_(true) {}
  template <class Position>
    requires std::convertible_to<const Position&, std::optional<idx_t>>
  constexpr first_positions(const Position& of_all) {
    const std::optional<idx_t> one(of_all);
    one_ = one.value_or(0), given_ = one.has_value();
  }
  template <class List>
    requires(!std::convertible_to<const List&, std::optional<idx_t>> && !std::same_as<List, first_positions>)
  constexpr first_positions(const List& of_each) : list_(of_each), given_(!list_.empty()) {}

  constexpr explicit operator bool() const { return given_; }
  constexpr idx_t of(idx_t item) const {
    return list_.empty() ? one_ : list_[list_.size() == 1 ? 0 : static_cast<std::size_t>(item)];
  }
  /// Those of a list, one or one for each batch item; empty where a number was given.
  constexpr list_view<idx_t> list() const { return list_; }

 private:
  list_view<idx_t> list_{};
  idx_t one_ = 0;
  bool given_ = false;
};

}}  // namespace attn::ATTN_ISA
