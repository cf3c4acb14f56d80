// attn: the features of performer, as kernels take them.
#pragma once

#include <attn/kernel/detail/kernel_checks.hpp>
#include <attn/kernel/detail/log_scales.hpp>
#include <attn/kernel/detail/projection.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Features of a token that one row of W makes.
constexpr idx_t features_per_row(performer_kernel kernel) {
  return kernel == performer_kernel::hyperbolic || kernel == performer_kernel::trigonometric ? 2 : 1;
}

template <class T>
struct performer_features final : projected_features<T> {
  using projected_features<T>::call, projected_features<T>::rows, projected_features<T>::dim;

  const performer_kernel kernel;
  const T scale, feature_eps;
  const bool centred;  // subtract the mean key
  const bool relu = kernel == performer_kernel::relu, is_signed = kernel == performer_kernel::trigonometric;
  /// Positive features with feature_eps: over the maximum of W x~ per query, and over all keys.
  const bool published = !relu && feature_eps > T(0);
  exponential_scaling<T> exponential{};
  T *centres = nullptr, *maxima = nullptr;  // [batch * heads][dim], [batch * heads]

  explicit performer_features(const kernel_call<T>& c)
      : projected_features<T>(c, features_per_row(c.kernel)),
        kernel(c.kernel),
        scale(c.given_scale.value_or(T(1) / std::sqrt(static_cast<T>(std::max<idx_t>(dim, 1))))),
        feature_eps(c.feature_eps.value_or(kernel == performer_kernel::relu ? T(1e-3) : T(0))),
        centred(c.center_keys) {
    exponential.features = this->features;
    exponential.divisor = is_signed ? rows : this->features;
    exponential.is_signed = is_signed;
    if (!relu && !published) this->scaling = &exponential;
  }

  static constexpr T log2_e = T(1.442695040888963407359924681);
  idx_t raw_size() const { return (this->features + tile_rows) * kernel_chunk; }

  void layout(arena& memory, idx_t item_heads) override {
    projected_features<T>::layout(memory, item_heads);
    centres = memory.allocate<T>(centred ? item_heads * dim : 0);
    maxima = memory.allocate<T>(published ? item_heads : 0);
  }

  /// The mean key is computed from sums over segments of keys, so that processes can share it (mpi/performer.hpp).
  void prepare(execution& exec) override {
    pack_rows();
    if (centred)
      exec.for_each(item_heads(), [&](idx_t item_head, int worker) {
        double *sums, *own;
        T* const row = exec.scratch(worker, [&](arena& memory) {
          sums = memory.allocate<double>(dim), own = memory.allocate<double>(dim);
          return memory.allocate<T>(dim);
        });
        std::fill_n(sums, dim, 0.0);
        for (idx_t n = 0; n * kernel_segment < call.lengths.keys(item_head / call.heads); ++n) {
          sum_segment(item_head, n, own, row);
          for (idx_t d = 0; d < dim; ++d) sums[d] += own[d];
        }
        set_centre(item_head, sums, call.seen_keys(item_head / call.heads));
      });
    if (published) find_maxima(exec);
  }

  void pack_rows() { this->pack(std::sqrt(scale) * (relu || is_signed ? T(1) : log2_e)); }
  idx_t item_heads() const { return call.k.extents[0] * call.heads; }
  stored_matrix<T> keys_of(idx_t item_head) const {
    return call.k.head(item_head / call.heads, item_head % call.heads / (call.heads / call.k.extents[1]));
  }

  /// The sum of the keys of segment n; `row` is scratch for one.
  void sum_segment(idx_t item_head, idx_t n, double* sums, T* row) const {
    const auto keys = keys_of(item_head);
    const idx_t b = item_head / call.heads, begin = n * kernel_segment, count = call.lengths.keys(b);
    const idx_t end = (std::min)(begin + kernel_segment, count);
    std::fill_n(sums, dim, 0.0);
    for (idx_t j = begin; j < end; ++j) {
      if (call.hides(b, j)) continue;
      keys.read_row(j, row);
      for (idx_t d = 0; d < dim; ++d) sums[d] += static_cast<double>(row[d]);
    }
  }
  void set_centre(idx_t item_head, const double* sums, idx_t count) const {
    for (idx_t d = 0; d < dim; ++d)
      centres[item_head * dim + d] = static_cast<T>(sums[d] / static_cast<double>(std::max<idx_t>(count, 1)));
  }

  /// body(item_head, begin, count, raw) takes W x~ of blocks of keys of each head, until it returns false.
  template <class Body>
  void each_block(execution& exec, Body&& body) const {
    exec.for_each(item_heads(), [&](idx_t item_head, int worker) {
      const idx_t count = call.lengths.keys(item_head / call.heads);
      T *columns, *raw;
      exec.scratch(worker, [&](arena& memory) {
        columns = memory.allocate<T>(dim * kernel_chunk);
        return raw = memory.allocate<T>(raw_size());
      });
      for (idx_t begin = 0, some = 0; begin < count; begin += some) {
        some = std::min<idx_t>(kernel_chunk, count - begin);
        pack_centred(keys_of(item_head).block(begin, some, 0, kernel_chunk), centre_of(item_head), columns);
        sum_squares(columns, dim, kernel_chunk, raw);
        if (has_long_tokens(raw, kernel_chunk)) [[unlikely]] shorten(columns, kernel_chunk, raw);
        this->project(item_head, columns, kernel_chunk, raw);
        if (!body(item_head, begin, some, raw)) return;
      }
    });
  }
  void find_maxima(execution& exec) const {
    std::fill_n(maxima, item_heads(), -std::numeric_limits<T>::infinity());
    each_block(exec, [&](idx_t item_head, idx_t begin, idx_t count, T* raw) {
      call.fill_hidden(item_head / call.heads, begin, count, raw, this->features, -std::numeric_limits<T>::infinity());
      for (idx_t n = 0; n < this->features * kernel_chunk; n += width<T>)
        maxima[item_head] = (std::max)(maxima[item_head], max_lanes(load<T>(raw + n)));
      return true;
    });
  }
  const T* centre_of(idx_t item_head) const { return centred ? centres + item_head * dim : nullptr; }

  void pack_centred(const token_rows<T>& x, const T* centre, T* columns) const {
    call.k.access->pack_columns(x, dim, columns);
    for (idx_t d = 0; centre && d < dim; ++d)
      for (idx_t t = 0; t < x.lanes; t += width<T>)
        store<T>(columns + d * kernel_chunk + t, sub(load<T>(columns + d * kernel_chunk + t), broadcast<T>(centre[d])));
  }

  /// Tokens so long that products with features would overflow are shortened: features differ no less.
  void shorten(T* columns, idx_t lanes, const T* squares) const {
    T powers[kernel_chunk];
    shorten_tokens(columns, dim, lanes, squares, std::numeric_limits<T>::max_exponent / 4 * 3, powers);
  }

  /// Logarithms or numbers as log_scaling takes them, or plain features, of a block of tokens.
  void raw_of(const token_rows<T>& x, idx_t item_head, const T* centre, T* phi, T* shift, T* columns) const {
    const idx_t m = rows;
    pack_centred(x, centre, columns);
    sum_squares(columns, dim, x.lanes, shift);
    if (has_long_tokens(shift, x.lanes)) [[unlikely]] shorten(columns, x.lanes, shift);
    this->project(item_head, columns, x.lanes, phi, centre || published ? nullptr : this->pairs_in(columns));
    const T half = (is_signed ? T(0.5) : T(-0.5)) * scale * log2_e;
    // Of [sin, cos] the scale of a long token would be infinite.
    const packet<T> most = broadcast<T>((std::numeric_limits<T>::max)() / 16);
    for (idx_t t = 0; t < x.lanes; t += width<T>)
      store<T>(shift + t, (min)(mul(load<T>(shift + t), broadcast<T>(half)), most));
    const auto each = [&](auto&& body) {
      for (idx_t r = 0; r < m; ++r)
        for (idx_t t = 0; t < x.lanes; t += width<T>) body(phi + r * kernel_chunk + t);
    };
    if (relu) {
      const packet<T> least = broadcast<T>(feature_eps);
      each([&](T* at) { store<T>(at, add(if_less(load<T>(at), zero<T>(), zero<T>(), load<T>(at)), least)); });
    }
    if (kernel == performer_kernel::hyperbolic)
      each([&](T* at) { store<T>(at + m * kernel_chunk, sub(zero<T>(), load<T>(at))); });
    if (is_signed) sines_of<T>(phi, m, x.lanes, nullptr);
  }

  /// As in the original: 2^(raw + shift - maximum) + feature_eps.
  void publish(T* phi, T* shift, const T* maximum) const {
    for (idx_t t = 0; t < kernel_chunk; t += width<T>)
      store<T>(shift + t, sub(load<T>(maximum + t), load<T>(shift + t)));
    exp2_below<T>(phi, this->features, nullptr, shift, phi);
    for (idx_t n = 0; n < this->features * kernel_chunk; n += width<T>)
      store<T>(phi + n, add(load<T>(phi + n), broadcast<T>(feature_eps)));
  }

  void keys(const token_rows<T>& x, idx_t item_head, T* phi, T* shift, T* work) const override {
    raw_of(x, item_head, centre_of(item_head), phi, shift, work);
    if (!published) return;
    T* const maximum = work + dim * kernel_chunk;
    std::fill_n(maximum, kernel_chunk, maxima[item_head]);
    publish(phi, shift, maximum);
  }
  void queries(const token_rows<T>& x, idx_t item_head, T* phi, T* shift, T* work) const override {
    raw_of(x, item_head, nullptr, phi, shift, work);
    if (!published) return;
    T* const maximum = work + dim * kernel_chunk;
    largest_of<T>(phi, this->features, nullptr, maximum);
    publish(phi, shift, maximum);
  }
};

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) struct performer_features<T>
#include <attn/core/detail/compiled.hpp>
