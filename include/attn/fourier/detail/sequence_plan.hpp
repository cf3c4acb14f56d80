// attn: the transform over tokens, split so that every task works within the cache.
//
// Row t of a block is row_width channels of token t. A block whose rows fit into the second cache is transformed in
// place. A longer one is cut, n = P s: column j, the P rows j, j + s, j + 2 s, ..., is transformed on its way in and
// turned by e^(-2 pi i j k / n), its result k being row j of part k; then every part, s rows, is transformed in place.
// So memory is written twice and read once, whatever the length. Results stay where these transforms leave them.
#pragma once

#include <attn/fourier/detail/plan.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
class sequence_plan {
  static constexpr idx_t wide = row_width<T>, row_bytes = wide * static_cast<idx_t>(sizeof(T));

 public:
  /// The plan of length n >= 1 and its memory; to be filled once.
  static sequence_plan layout(arena& memory, idx_t n) {
    constexpr idx_t in_cache = 512 * 1024 / row_bytes;
    sequence_plan plan;
    plan.length_ = n;
    if (n > in_cache && fourier_plan<T>::is_smooth(n))
      for (plan.parts_ = (n + in_cache - 1) / in_cache; n % plan.parts_ != 0;) ++plan.parts_;
    plan.size_ = n / plan.parts_;
    plan.within_part_ = fourier_plan<T>::layout(memory, plan.size_);
    plan.places_ = memory.allocate<idx_t>(n);
    plan.tokens_ = memory.allocate<idx_t>(plan.rows());
    if (plan.parts_ > 1) {
      plan.across_parts_ = fourier_plan<T>::layout(memory, plan.parts_);
      plan.roots_ = root_table::layout(memory, n);
      plan.twiddles_ = memory.allocate<T>(2 * n);
    }
    return plan;
  }

  idx_t length() const { return length_; }
  idx_t parts() const { return parts_; }
  /// Rows of a block.
  idx_t rows() const { return parts_ * part_stride(); }
  /// Rows of memory that a worker needs to take in `blocks` blocks at a time.
  idx_t spare_rows(idx_t blocks) const {
    return (std::max)(within_part_.spare_rows(), parts_ > 1 ? blocks * 2 * together * parts_ : 0);
  }

  /// Computes the tables; `spare` is memory of spare_rows() rows.
  void fill(T* spare) const {
    within_part_.fill(spare);
    if (parts_ > 1) {
      across_parts_.fill(spare);
      roots_.fill();
      T* to = twiddles_;
      for (idx_t j = 0; j < size_; ++j)
        for (idx_t k = 0; k < parts_; ++k, to += 2) put_root(to, roots_(j * k));
    }
    // Result k = k_0 + P m is result m of part k_0.
    std::fill(tokens_, tokens_ + rows(), length_);
    for (idx_t part = 0; part < parts_; ++part)
      for (idx_t m = 0; m < size_; ++m) {
        const idx_t k = part + parts_ * m;
        places_[k] = part * part_stride() + within_part_.order(m);
        tokens_[places_[k]] = k;
      }
    idx_t count = 0;
    for (idx_t place = 0; place < rows(); ++place) {  // without a branch: none of them could be predicted
      tokens_[count] = tokens_[place];
      count += tokens_[place] <= length_ / 2;
    }
  }

  /// The row of result l in its block.
  idx_t place(idx_t l) const { return places_[l]; }
  /// The results l <= n / 2 in the order of their places.
  idx_t token(idx_t i) const { return tokens_[i]; }

  /// Slices in which the input is read, one a task.
  idx_t input_slices() const {
    return parts_ == 1 ? (length_ / 2 + tokens_together) / tokens_together : (size_ / 2 + together) / together;
  }

  /// One slice of blocks [begin, end); block 0 begins at `rows`. load(block, t, row, mirrored) writes rows t and -t.
  template <class Load>
  void read_input(idx_t slice, idx_t begin, idx_t end, T* rows, T* spare, Load&& load) const {
    if (parts_ == 1) {
      const idx_t last = (std::min)((slice + 1) * tokens_together - 1, length_ / 2);
      for (idx_t t = slice * tokens_together; t <= last; ++t)
        for (idx_t b = begin; b < end; ++b) {
          T* const block = rows + b * this->rows() * wide;
          load(b, t, block + t * wide, block + mirror(t, length_) * wide);
        }
      return;
    }
    // Column j comes with its mirror image -j, unless it is its own.
    const idx_t first = slice * together, count = (std::min)(together, size_ / 2 + 1 - first);
    const auto is_own_image = [&](idx_t c) { return first + c == mirror(first + c, size_); };
    const auto column = [&](idx_t b, idx_t c, bool image) {
      return spare + (((b - begin) * 2 + image) * together + c) * parts_ * wide;
    };
    for (idx_t q = 0; q < parts_; ++q)
      for (idx_t c = 0; c < count; ++c) {
        const idx_t j = first + c, image_q = j == 0 ? mirror(q, parts_) : parts_ - 1 - q;
        const bool own = is_own_image(c);
        if (own && q > image_q) continue;
        for (idx_t b = begin; b < end; ++b)
          load(b, j + q * size_, column(b, c, false) + q * wide, column(b, c, !own) + image_q * wide);
      }
    for (idx_t b = begin; b < end; ++b) {
      for (idx_t c = 0; c < count; ++c) {
        across_parts_.transform(column(b, c, false), nullptr);
        if (!is_own_image(c)) across_parts_.transform(column(b, c, true), nullptr);
      }
      for (idx_t k = 0; k < parts_; ++k) {
        T* const part = rows + (b * this->rows() + k * part_stride()) * wide;
        const idx_t at = across_parts_.order(k) * wide;
        for (const bool image : {false, true})
          for (idx_t c = 0; c < count; ++c) {
            if (image && is_own_image(c)) continue;
            const idx_t j = image ? mirror(first + c, size_) : first + c;
            store_row(part + j * wide, times(load_row(column(b, c, image) + at), twiddles_ + 2 * (j * parts_ + k)));
          }
      }
    }
  }

  /// Transforms one part of the block that begins at `rows`; spare_rows(0) rows are needed.
  void transform_part(idx_t part, T* rows, T* spare) const {
    within_part_.transform(rows + part * part_stride() * wide, spare);
  }
  /// The same in two steps of pieces_of_part() pieces each.
  idx_t pieces_of_part() const { return within_part_.pieces(); }
  void start_part(idx_t part, idx_t piece, T* rows) const {
    within_part_.start(piece, rows + part * part_stride() * wide);
  }
  void finish_part(idx_t part, idx_t piece, T* rows) const {
    within_part_.finish(piece, rows + part * part_stride() * wide);
  }

 private:
  /// Columns and tokens that are taken in together, so that memory is not touched by single rows.
  static constexpr idx_t together = 4, tokens_together = 32;

  /// Parts of 2^k rows would all fall into the same few sets of the caches: a page and two rows lie between them.
  idx_t part_stride() const { return parts_ > 1 ? size_ + 34 : size_; }

  idx_t length_ = 0, parts_ = 1, size_ = 0;
  fourier_plan<T> within_part_, across_parts_;
  root_table roots_;
  idx_t *places_ = nullptr, *tokens_ = nullptr;
  T* twiddles_ = nullptr;
};

}}}  // namespace attn::ATTN_ISA::detail
