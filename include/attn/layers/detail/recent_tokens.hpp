// attn: the last tokens of streams, which short_convolution and token_shift go on from.
#pragma once

#include <attn/core/detail/item_state.hpp>
#include <attn/layers/detail/short_convolution_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The inside of short_convolution_state and of token_shift_state, which has width 2.
template <class S>
class recent_tokens : public item_state<recent_tokens<S>, S> {
  using base = item_state<recent_tokens<S>, S>;

 public:
  recent_tokens(const char* name, idx_t of_batch, idx_t of_channels, idx_t of_width)
      : base(name, of_batch, 0), channels_(of_channels), width_(of_width) {
    const validator check{name};
    check.at_least("channels", 0, channels_);
    check.at_least("width", 1, width_);
    check.fits("states", {std::max<idx_t>(of_batch, 1), width_, std::max<idx_t>(channels_, 1), 8});
    base::allocate(of_batch, place_size());
  }

  idx_t channels() const { return channels_; }
  idx_t width() const { return width_; }
  using base::batch;
  /// [B, w - 1, C]
  tensor_view<S, 3> entries() const { return {this->items().data, {batch(), width() - 1, channels()}}; }
  void clear(idx_t b) { std::fill_n(this->items().data + b * place_size(), place_size(), static_cast<S>(0.0f)); }

  void check_extents(const call_views& check, const memory_layout& x) const {
    check.extents({{"x batch = batch of the state", batch(), x.extents[0]},
                   {"x dim = channels of the state", channels(), x.extents[2]}});
  }
  void feed(const tensor_view<const S, 3>& x, std::span<const idx_t> lengths) {
    store_last_tokens<S>(x, lengths, entries(), entries());
    this->advance(x.extent(1), lengths);
  }
  /// Checked, of the function `name`.
  void append_tokens(const char* name, const tensor_view<const S, 3>& x, std::span<const idx_t> lengths) {
    call_views check{name};
    check.read("x", x);
    check.update("the state", this->memory());
    check_extents(check, x);
    check_length_list(check, "lengths", lengths, batch(), x.extent(1));
    feed(x, lengths);
  }

 private:
  idx_t place_size() const { return (width() - 1) * channels(); }

  idx_t channels_, width_;
};

}}}  // namespace attn::ATTN_ISA::detail
