// attn: what a part of a head leaves to be added up in sliding_window_backward (window_backward.hpp): its shares of the
// gradients of its keys and its neighbours', of global keys and queries, and of parameters.
#pragma once

#include <attn/softmax/detail/backward_memory.hpp>
#include <attn/softmax/sliding_window.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Numbers of each.
struct window_partial_sizes {
  idx_t keys, values;               // [globals][stride]
  idx_t queries, relative_queries;  // [group][globals][stride]; the latter of relative keys
  idx_t slopes, tables;             // [group], [group][table_size()]
  idx_t relative, decay;            // [group][relative_entries()], [group][2 globals]: by global query and key
};

template <class T>
class window_partial {
 public:
  static window_partial layout(arena& memory, const window_partial_sizes& size) {
    window_partial p;
    p.size_ = size;
    p.numbers_ = memory.allocate<T>(p.count());
    p.sums_ = memory.allocate<double>(size.relative + size.decay);
    return p;
  }
  void clear() const {
    std::fill_n(numbers_, count(), T(0));
    std::fill_n(sums_, size_.relative + size_.decay, 0.0);
  }
  void add(const window_partial& more) const {
    for (idx_t x = 0; x < count(); ++x) numbers_[x] += more.numbers_[x];
    for (idx_t x = 0; x < size_.relative + size_.decay; ++x) sums_[x] += more.sums_[x];
  }

  T* keys() const { return numbers_; }
  T* values() const { return keys() + size_.keys; }
  T* queries() const { return values() + size_.values; }
  T* relative_queries() const { return queries() + size_.queries; }
  T* slopes() const { return relative_queries() + size_.relative_queries; }
  T* tables() const { return slopes() + size_.slopes; }
  double* relative() const { return sums_; }
  double* decay() const { return sums_ + size_.relative; }

 private:
  idx_t count() const {
    return size_.keys + size_.values + size_.queries + size_.relative_queries + size_.slopes + size_.tables;
  }
  window_partial_sizes size_{};
  T* numbers_ = nullptr;
  double* sums_ = nullptr;
};

/// The keys [k0, k1) of class r of a key head, for the query heads [h, h_end), whose dilation is d.
template <class P>
struct window_part : class_rows {
  using T = sum_type<P>;

  idx_t b = 0, kv = 0, h = 0, h_end = 0, number = 0;  // number: in the class
  idx_t k0 = 0, k1 = 0;
  bool last = false;                                  // of the class
  bool stored = true;                                 // or not a part of the class
  backward_keys<P> sums{};                            // of all keys that it sees, by slot
  double* decay = nullptr;                            // [group][slots]: sums of the gradients of scores by key
  window_partial<T> others{};

  /// Adds the keys of the class that the part owns.
  decay_gradients owned(decay_gradients of) const {
    of.first = r + d * k0, of.end = r + d * k1;
    return of;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
