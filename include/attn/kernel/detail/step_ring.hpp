// attn: the last states of a sequence, to go back to: speculative decoding feeds tokens that may be rejected.
//
// Memory is a ring of keep + 1 places, each with the state after one token; going back only changes which place is the
// state's.
#pragma once

#include <attn/core/detail/check.hpp>

#include <algorithm>

namespace attn::inline ATTN_ISA::detail {

class step_ring {
 public:
  /// Throws std::invalid_argument for keep < 0 or more than any memory can hold.
  step_ring(const char* name, index keep) : keep_(keep) {
    const validator check(name);
    check.at_least("keep", 0, keep);
    check.fits("kept tokens", {keep, 1});
  }

  index places() const { return keep_ + 1; }
  /// Of the state.
  index place() const { return place_; }
  /// Tokens that can be undone.
  index kept() const { return kept_; }

  /// Of n tokens to be fed, how many the ring has no place for: they come first.
  index beyond(index n) const { return std::max<index>(0, n - keep_); }
  /// No token before now can be undone.
  void forget() { kept_ = 0; }
  /// Moves on by one token; what it makes of the state before goes to the new place.
  void advance() {
    place_ = (place_ + 1) % places();
    kept_ = std::min(kept_ + 1, keep_);
  }
  /// Throws std::invalid_argument for m < 0 or more than kept().
  void rollback(const char* name, index m) {
    if (m < 0 || m > kept_)
      validator(name).fail(text({"tokens to undo from 0 to ", kept_, ", those kept of the last ", keep_}), m);
    place_ = (place_ + places() - m) % places();
    kept_ -= m;
  }

 private:
  index keep_ = 0, place_ = 0, kept_ = 0;
};

}  // namespace attn::inline ATTN_ISA::detail
