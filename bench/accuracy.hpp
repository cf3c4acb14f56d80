// attn_bench: real queries, keys and values, and the error of results relative to full softmax.
#pragma once

#include <attn/core/detail/eigen.hpp>

#include <string>
#include <vector>

#include "problem.hpp"

namespace bench {

/// Real queries, keys and values with what they should give. Errors are relative, in the Frobenius norm, over all
/// heads.
class dataset {
 public:
  /// Which full softmax is the reference. Shared keys are the queries divided by their norms; the scale is then 1, and
  /// a query sees its own key only if there is no other.
  struct form {
    bool causal = false, shared_keys = false;
  };
  using answers = std::vector<Eigen::MatrixXd>;  // one [length, dim_v] a batch item and head

  /// Reads q.npy, k.npy, v.npy of `folder`; throws std::runtime_error where they do not fit together, are
  /// not finite, or where values are all 0, as then what errors are relative to is.
  explicit dataset(const std::string& folder);

  /// The folder's own name.
  const std::string& name() const { return name_; }

  idx_t batch() const { return batch_; }
  idx_t heads() const { return heads_; }
  idx_t kv_heads() const { return kv_heads_; }
  idx_t length() const { return length_; }
  idx_t dim() const { return dim_; }
  idx_t dim_v() const { return dim_v_; }
  const std::vector<float>& q() const { return q_; }
  const std::vector<float>& k() const { return k_; }
  const std::vector<float>& v() const { return v_; }

  /// The shape of one batch item.
  problem problem_for(bool causal, const flags&) const;
  /// The error of results [batch, heads, length, dim_v].
  double distance(const std::vector<float>& out, form) const;
  /// The error of the mean of the values each query may see, which uses neither queries nor keys.
  double mean_error(form) const;

 private:
  idx_t kv_head_of(idx_t head) const;
  const answers& exact(form) const;

  std::string name_;
  idx_t batch_, heads_, kv_heads_, length_, dim_, dim_v_;
  std::vector<float> q_, k_, v_;
  mutable answers exact_[2][2];  // computed when first asked for
};

}  // namespace bench
