// attn: random features for performer and rfa that are drawn when a head dim is first met, and kept: for models whose
// layers have heads of different sizes.
//
//   const attn::kept_features<float> features(256, {.seed = 7});
//   attend = [=](auto q, auto k, auto v, auto o, auto& exec) { attn::performer(q, k, v, o, features.of(q), exec); };
//
// Those of dim D are draw_features<S>(count, D, options), whatever was drawn before. Copies share what is drawn; views
// of it are valid as long as one of them lives. Several threads may call of(); one that draws lets the others wait.
// Only the first call for a dim allocates.
//
// Throws   std::invalid_argument as draw_features does, when features are drawn.
#pragma once

#include <attn/kernel/draw_features.hpp>

#include <map>
#include <memory>
#include <mutex>

namespace attn { inline namespace ATTN_ISA {

template <element S>
class kept_features {
 public:
  explicit kept_features(idx_t count, const draw_options& options = {}) : kept_(std::make_shared<kept>()) {
    kept_->count = count;
    kept_->options = options;
  }

  /// [heads of the options, count, dim]
  tensor_view<const S, 3> of(idx_t dim) const {
    const std::lock_guard lock(kept_->drawing);
    const auto found = kept_->by_dim.find(dim);
    if (found != kept_->by_dim.end()) return std::as_const(found->second).view();
    auto drawn = draw_features<S>(kept_->count, dim, kept_->options);
    return std::as_const(kept_->by_dim.emplace(dim, std::move(drawn)).first->second).view();
  }
  /// For queries or keys, whose last extent is the dim.
  template <class T>
  tensor_view<const S, 3> of(const tensor_view<T>& q) const {
    return of(q.extent(3));
  }

 private:
  struct kept {
    idx_t count = 0;
    draw_options options{};
    std::mutex drawing;
    std::map<idx_t, tensor<S, 3>> by_dim;
  };
  std::shared_ptr<kept> kept_;
};

}}  // namespace attn::ATTN_ISA
