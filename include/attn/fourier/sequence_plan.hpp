// attn: the transform over tokens, split so that every piece of work is done in the cache.
//
// The rows of a sequence (row_width channels of each token) lie in blocks, one after the other. A length n whose rows
// fit into the second cache is transformed where it lies. A longer one is n = P s: column j, the P rows j, j + s, ...,
// is transformed on its way in and turned by e^(-2 pi i j k / n), result k into part k; then every part, s rows, is
// transformed where it lies. So memory is written twice and read once, whatever the length.
#pragma once

#include <attn/fourier/hartley.hpp>

namespace attn::detail {

template <class T>
class sequence_plan {
  static constexpr index wide = row_width<T>, row_bytes = wide * static_cast<index>(sizeof(T));

 public:
  static sequence_plan layout(carver& memory, index n) {
    constexpr index near = 256 * 1024 / row_bytes;
    sequence_plan plan;
    plan.length_ = n;
    if (n > 2 * near) plan.parts_ = fourier_plan<T>::divisor(n, (n + near - 1) / near);
    plan.size_ = n / plan.parts_;
    plan.within_part_ = fourier_plan<T>::layout(memory, plan.size_);
    plan.places_ = memory.take<index>(n);
    plan.tokens_ = memory.take<index>(plan.rows());
    if (plan.parts_ > 1) {
      plan.across_parts_ = fourier_plan<T>::layout(memory, plan.parts_);
      plan.roots_ = root_table::layout(memory, n);
      plan.twiddles_ = memory.take<T>(2 * n);
    }
    return plan;
  }

  index length() const { return length_; }
  index parts() const { return parts_; }
  /// Rows from one block of channels to the next.
  index rows() const { return parts_ * part_stride(); }
  /// Rows of memory a worker needs for `blocks` blocks at a time.
  index spare_rows(index blocks) const {
    return std::max(within_part_.spare_rows(), parts_ > 1 ? blocks * 2 * together * parts_ : 0);
  }

  /// Computes the tables.
  void fill(T* spare) const {
    within_part_.fill(spare);
    if (parts_ > 1) {
      across_parts_.fill(spare);
      roots_.fill();
      T* to = twiddles_;
      for (index j = 0; j < size_; ++j)
        for (index k = 0; k < parts_; ++k, to += 2) put_root(to, roots_(j * k));
    }
    // Result k = k_0 + P m is result m of part k_0.
    std::fill(tokens_, tokens_ + rows(), length_);
    for (index part = 0; part < parts_; ++part)
      for (index m = 0; m < size_; ++m) {
        const index k = part + parts_ * m;
        places_[k] = part * part_stride() + within_part_.order(m);
        tokens_[places_[k]] = k;
      }
    std::remove_if(tokens_, tokens_ + rows(), [this](index k) { return k > length_ / 2; });
  }

  /// Result l stands at this row of its block.
  index place(index l) const { return places_[l]; }
  /// The results l <= n / 2 in the order of their places.
  index token(index i) const { return tokens_[i]; }

  /// Pieces of work that take the input in. Piece by piece load(block, t, row, mirrored) is asked to write rows t and
  /// -t of blocks [begin, end); that of block 0 begins at `rows`.
  index input_pieces() const {
    return parts_ == 1 ? (length_ / 2 + tokens_together) / tokens_together : (size_ / 2 + together) / together;
  }

  template <class Load>
  void take_in(index piece, index begin, index end, T* rows, T* spare, Load&& load) const {
    if (parts_ == 1) {
      const index last = std::min((piece + 1) * tokens_together - 1, length_ / 2);
      for (index t = piece * tokens_together; t <= last; ++t)
        for (index b = begin; b < end; ++b) {
          T* const block = rows + b * this->rows() * wide;
          load(b, t, block + t * wide, block + mirror(t, length_) * wide);
        }
      return;
    }
    // The mirror image of column j is column -j: itself where j = -j modulo s.
    const index first = piece * together, count = std::min(together, size_ / 2 + 1 - first);
    const auto column = [&](index b, index c, bool image) {
      return spare + (((b - begin) * 2 + image) * together + c) * parts_ * wide;
    };
    for (index q = 0; q < parts_; ++q)
      for (index c = 0; c < count; ++c) {
        const index j = first + c, image_q = j == 0 ? mirror(q, parts_) : parts_ - 1 - q;
        const bool own = j == mirror(j, size_);
        if (!own || q <= image_q)
          for (index b = begin; b < end; ++b)
            load(b, j + q * size_, column(b, c, false) + q * wide, column(b, c, !own) + image_q * wide);
      }
    for (index b = begin; b < end; ++b) {
      for (index c = 0; c < count; ++c)
        for (const bool image : {false, true}) across_parts_.transform(column(b, c, image), nullptr);
      for (index k = 0; k < parts_; ++k) {
        T* const part = rows + (b * this->rows() + k * part_stride()) * wide;
        const index at = across_parts_.order(k) * wide;
        for (const bool image : {false, true})
          for (index c = 0; c < count; ++c) {
            const index j = image ? mirror(first + c, size_) : first + c;
            if (image && j == first + c) continue;
            store_row(part + j * wide, times(load_row(column(b, c, image) + at), twiddles_ + 2 * (j * parts_ + k)));
          }
      }
    }
  }

  /// Transforms one part of one block, which begins at `rows`.
  void transform_part(index part, T* rows, T* spare) const {
    within_part_.transform(rows + part * part_stride() * wide, spare);
  }

 private:
  /// Neighbours that are taken in together, so that memory is read and written by more than a line.
  static constexpr index together = 4, tokens_together = 32;

  /// Parts stand a page and a bit apart from a power of two, lest all their rows fall into the same few sets of caches.
  index part_stride() const { return parts_ > 1 ? size_ + 34 : size_; }

  index length_ = 0, parts_ = 1, size_ = 0;
  fourier_plan<T> within_part_, across_parts_;
  root_table roots_;
  index *places_ = nullptr, *tokens_ = nullptr;
  T* twiddles_ = nullptr;
};

}  // namespace attn::detail
