// attn: what the engine of kernel attention asks of features. It sees this and
// no map, so that it is compiled once for all of them; calls come once a chunk,
// and cost nothing.
#pragma once

#include <attn/core/execution.hpp>
#include <attn/kernel/detail/chunk.hpp>

namespace attn::inline ATTN_ISA::detail {

/// Up to a chunk of tokens, wherever they lie.
template <class S>
struct token_rows {
  const S* at[kernel_chunk];
  index count = 0, col_stride = 1;
  index lanes = kernel_chunk;  // that must be filled

  const S* operator()(index t) const { return at[t]; }

  /// Rows [begin, begin + count) of one head; those before `first` are never looked at, and stand for it.
  token_rows(const matrix_view<const S>& x, index begin, index tokens, index first = 0)
      : count(tokens), col_stride(x.col_stride) {
    for (index t = 0; t < count; ++t) at[t] = x.row(begin + std::max(t, first));
  }
  /// To be filled in, and only for the lanes of tokens.
  token_rows(index tokens, index stride)
      : count(tokens), col_stride(stride), lanes(round_up(tokens, panel_width<compute_type<S>>)) {}
};

/// Features, transposed, [feature][kernel_chunk]. `pair` is batch item * heads of sums + head. `shift` has a number a
/// token, where features have levels; `work` is scratch memory.
template <class S>
struct kernel_features {
  using T = compute_type<S>;

  virtual index features() const = 0;
  /// Numbers of scratch memory a worker needs.
  virtual index work() const = 0;
  /// Are they the same for all heads?
  virtual bool shared() const { return true; }
  /// Shared memory of the call, and what fills it.
  virtual void layout(arena&, index) {}
  virtual void prepare(execution&) {}
  virtual void keys(const token_rows<S>&, index pair, T* phi, T* shift, T* work) const = 0;
  virtual void queries(const token_rows<S>& x, index pair, T* phi, T* shift, T* work) const {
    keys(x, pair, phi, shift, work);
  }

  // Where features are exponentials: see levels.hpp. Then keys() and queries()
  // give what these take.
  virtual bool leveled() const { return false; }
  virtual void key_state(const T*, const T*, T*, T*, T*) const {}
  virtual void key_own(T*, const T*, T*, index, T*, T*) const {}
  virtual void query_state(const T*, const T*, T*, T*) const {}
  virtual void query_own(T*, T*) const {}
  virtual void join(const T*, const T*, const T*, const T*, T, T*, T*, T*) const {}
  virtual bool doubtful(T) const { return false; }
  virtual void weigh_carefully(const token_rows<S>&, const token_rows<S>&, index, T*) const {}
  virtual void finish_carefully(const chunk_view<T>&, index, T, T, T, T, T*, T*) const {}
  virtual void step_key(T*, T, T*, T*) const {}
  virtual T step_query(T*, const T*, T, T eps) const { return eps; }

 protected:
  ~kernel_features() = default;
};

}  // namespace attn::detail
