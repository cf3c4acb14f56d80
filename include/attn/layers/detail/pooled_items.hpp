// attn: the inside of pooled_tokens_state: of every batch item the tokens of its unfinished window, and with overlap
// the first halves of the window before it.
#pragma once

#include <attn/core/detail/item_state.hpp>
#include <attn/layers/detail/pooled_tokens_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

struct pooled_extents {
  idx_t batch, heads, channels, window;
  bool overlap, logits;
};

template <class S>
class pooled_items : public item_state<pooled_items<S>, S> {
  using base = item_state<pooled_items<S>, S>;

 public:
  using base::batch;

  explicit pooled_items(const pooled_extents& e) : base("pooled_tokens_state", e.batch, 0), extents_(e) {
    const validator check{this->name_};
    check.at_least("heads", 0, e.heads);
    check.at_least("channels", 0, e.channels);
    dim_ = check_windows(check, e.channels, e.window, e.overlap);
    check.fits("states", {std::max<idx_t>(e.batch, 1), std::max<idx_t>(e.heads, 1), e.window,
                          std::max<idx_t>(e.channels, 1), 4 * 8});
    base::allocate(e.batch, place_size());
  }

  idx_t heads() const { return extents_.heads; }
  idx_t channels() const { return extents_.channels; }
  idx_t window() const { return extents_.window; }
  idx_t dim() const { return dim_; }
  void clear(idx_t b) { std::fill_n(this->items().data + b * place_size(), place_size(), static_cast<S>(0.0f)); }

  /// The most windows that any item completes with its next tokens.
  idx_t rows_of(idx_t count, std::span<const idx_t> given) const {
    idx_t most = 0;
    for (idx_t b = 0; b < batch(); ++b)
      most = (std::max)(most, (this->length(b) % window() + this->taken_of(b, count, given)) / window());
    return most;
  }
  void check_tokens(call_views& check, const memory_layout& x, const memory_layout& logits, const memory_layout& bias,
                    std::span<const idx_t> lengths) const {
    check.extents({{"x batch = batch of the state", batch(), x.extents[0]},
                   {"x heads = heads of the state", heads(), x.extents[1]},
                   {"x channels = channels of the state", channels(), x.extents[3]}});
    if (logits.given() != extents_.logits)
      check.fail({extents_.logits ? "logits, since the state has them" : "no logits, since the state has none"},
                 extents_.logits ? "none" : "logits");
    check_pooled(check, x, logits, bias, window(), lengths);
  }
  pooled_tokens_driver<compute_type<S>> call_of(const tensor_view<const S>& x, const tensor_view<const S>& logits,
                                              const tensor_view<const S, 3>& bias,
                                              std::span<const idx_t> lengths) const {
    auto call = make_pooled<S>(x, logits, bias, window(), extents_.overlap, lengths);
    call.before = this->lengths();
    for (int kind = 0; kind < kinds(); ++kind) {
      auto& source = kind == 0 ? call.x : call.logits;
      source.current = current(kind), source.previous = previous(kind);
    }
    return call;
  }
  /// After their results, which see the state before them.
  void feed(const tensor_view<const S>& x, const tensor_view<const S>& logits, std::span<const idx_t> lengths) {
    for (idx_t b = 0; b < batch(); ++b)
      for (int kind = 0; kind < kinds(); ++kind)
        for (idx_t h = 0; h < heads(); ++h)
          feed(kind, kind == 0 ? x : logits, b, h, this->taken_of(b, x.extent(2), lengths));
    this->advance(x.extent(2), lengths);
  }

 private:
  int kinds() const { return extents_.logits ? 2 : 1; }
  idx_t current_size() const { return (window() - 1) * channels(); }
  idx_t head_size() const { return current_size() + (extents_.overlap ? window() * dim() : 0); }
  idx_t place_size() const { return kinds() * heads() * head_size(); }
  S* memory_of(int kind) const { return this->items().data + kind * heads() * head_size(); }
  tensor_view<S> current(int kind) const {
    return {memory_of(kind), {batch(), heads(), window() - 1, channels()}, {place_size(), head_size(), channels(), 1}};
  }
  tensor_view<S> previous(int kind) const {
    if (!extents_.overlap) return {};
    return {memory_of(kind) + current_size(), {batch(), heads(), window(), dim()},
            {place_size(), head_size(), dim(), 1}};
  }

  void feed(int kind, const tensor_view<const S>& x, idx_t b, idx_t h, idx_t count) {
    const tensor_view<S> now = current(kind), before = previous(kind);
    const idx_t held = this->length(b) % window(), complete = (held + count) / window() * window();
    const auto token = [&](idx_t i, idx_t c) { return i < held ? now(b, h, i, c) : x(b, h, i - held, c); };
    for (idx_t r = 0; r < window() && extents_.overlap && complete > 0; ++r)
      for (idx_t c = 0; c < dim(); ++c) before(b, h, r, c) = token(complete - window() + r, c);
    // The first unfinished window only grows; of a later one all tokens are new.
    for (idx_t i = complete > 0 ? complete : held; i < held + count; ++i)
      for (idx_t c = 0; c < channels(); ++c) now(b, h, i - complete, c) = token(i, c);
  }

  pooled_extents extents_;
  idx_t dim_ = 0;
};

}}}  // namespace attn::ATTN_ISA::detail
