// attn: the feature maps of kernel attention, as the kernels call them: once per chunk, through this interface, so that
// these are compiled once for all maps.
#pragma once

#include <attn/kernel/detail/chunk.hpp>
#include <attn/kernel/detail/panels.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct log_scaling;

/// Makes features from tokens: transposed, [feature][kernel_chunk], in the lanes of the block.
template <class T>
struct feature_map {
  idx_t features = 0;      // of a token
  idx_t scratch_size = 0;  // numbers of scratch memory a worker needs
  idx_t operations = 0;    // to make the features of one token, roughly
  bool shared = true;      // the same for all heads
  /// Where features are exponentials, keys() and queries() give logarithms and `shift`, one number per token, for all
  /// lanes: see log_scales.hpp. Null: they give the features.
  const log_scaling<T>* scaling = nullptr;

  feature_map() = default;
  feature_map(const feature_map&) = delete;

  /// Allocates and fills shared memory of the call.
  virtual void layout(arena&, idx_t /*item_heads*/) {}
  virtual void prepare(execution&) {}
  /// `item_head` is batch item * heads of sums + head; `scratch` has `scratch_size` numbers.
  virtual void keys(const token_rows<T>&, idx_t item_head, T* phi, T* shift, T* scratch) const = 0;
  virtual void queries(const token_rows<T>& x, idx_t item_head, T* phi, T* shift, T* scratch) const {
    keys(x, item_head, phi, shift, scratch);
  }
  /// Features of rows [begin, begin + count) as rows, 0 beyond the last feature. Only linear's maps have this.
  virtual void rows(const stored_matrix<T>&, idx_t /*begin*/, idx_t /*count*/, const panels<T>& /*to*/,
                    T* /*scratch*/) const {}

 protected:
  ~feature_map() = default;
};

/// The interface that the kernel uses where features are exponentials. The features of a block are `raw` and `shift`;
/// log scales are those of the sums.
template <class T>
struct log_scaling {
  /// Raises the log scales to the keys of a chunk; s.k_phi is over the new ones, s.row_decay[r] = 2^(old - new).
  virtual void keys_for_sums(const T* raw, T* log_scale, const kernel_scratch<T>& s) const = 0;
  /// s.k_own for the queries of the chunk, in place; s.score_factor and the running maximum of their logarithms.
  virtual void keys_for_chunk(idx_t count, const kernel_scratch<T>& s) const = 0;
  /// Queries for the sums (into q_phi, q_max), and s.q_own for the keys of the chunk (in place, own_max); the maxima
  /// are the logarithms of the largest feature.
  virtual void queries_for_sums(const T* raw, const T* log_scale, const kernel_scratch<T>& s) const = 0;
  virtual void queries_for_chunk(const kernel_scratch<T>& s) const = 0;
  /// The factors that bring the two parts of a row to the scale of the larger one, and eps over that scale.
  virtual void join(bool of_sums, bool of_chunk, T eps, const kernel_scratch<T>& s) const = 0;
  /// Whether a row with this denominator has underflowed and needs recomputation.
  virtual bool underflowed(T denominator) const = 0;
  /// Row i of a chunk, recomputed from s.q_raw and s.k_raw: its keys weighed by logarithms.
  virtual void recompute_row(const chunk_view<T>&, idx_t i, T eps, const kernel_scratch<T>& s, T* out) const = 0;
  /// One token, features contiguous, in place.
  virtual void step_key(T* raw, T shift, T* log_scale, T* decay) const = 0;
  /// Returns eps over the scale of the query.
  virtual T step_query(T* raw, const T* log_scale, T shift, T eps) const = 0;

 protected:
  ~log_scaling() = default;
};

}}}  // namespace attn::ATTN_ISA::detail
