// attn_bench: an operator's error on real queries, keys and values, relative to full softmax.
#pragma once

#include <attn/core/detail/eigen.hpp>

#include <string>
#include <vector>

#include "table.hpp"

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

  /// Reads q.npy, k.npy, v.npy of `folder`; throws std::runtime_error where they do not fit together.
  explicit dataset(const std::string& folder);

  /// The folder's own name.
  const std::string& name() const { return name_; }

  index length() const { return length_; }

  double error(const operator_entry&, bool causal, const flags&) const;
  /// Token by token, against causal full softmax.
  double error(const decode_entry&, const flags&) const;
  /// The error of the mean of the values each query may see, which uses neither queries nor keys.
  double mean_error(form) const;

 private:
  problem problem_for(bool causal, const flags&) const;
  index kv_head_of(index head) const;
  const answers& exact(form) const;
  double distance(const std::vector<float>& out, form) const;
  input batch_item(const std::vector<float>& x, index item, index heads, index dim) const;

  std::string name_;
  index batch_, heads_, kv_heads_, length_, dim_, dim_v_;
  std::vector<float> q_, k_, v_;
  mutable answers exact_[2][2];  // computed when first asked for
};

}  // namespace bench
