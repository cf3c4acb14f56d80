#include "accuracy.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <stdexcept>

#include "npy.hpp"

namespace bench {
namespace {

using matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

matrix rows(const std::vector<float>& x, idx_t head, idx_t length, idx_t dim) {
  using map = Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>;
  return map(x.data() + head * length * dim, length, dim).cast<double>();
}

/// Plain softmax, a few queries at a time so that long inputs fit into memory.
Eigen::MatrixXd attend(const matrix& q, const matrix& k, const matrix& v, dataset::form of) {
  constexpr idx_t block = 256;
  const double scale = of.shared_keys ? 1 : 1 / std::sqrt(static_cast<double>(q.cols()));
  Eigen::MatrixXd out(q.rows(), v.cols());
  for (idx_t begin = 0; begin < q.rows(); begin += block) {
    const idx_t count = std::min(block, q.rows() - begin);
    Eigen::MatrixXd weights = q.middleRows(begin, count) * k.transpose() * scale;
    for (idx_t i = 0; i < count; ++i) {
      const idx_t seen = of.causal ? begin + i + 1 : k.rows();
      auto row = weights.row(i);
      row.tail(k.rows() - seen).setZero();
      if (of.shared_keys && seen > 1) row[begin + i] = -std::numeric_limits<double>::infinity();
      row.head(seen) = (row.head(seen).array() - row.head(seen).maxCoeff()).exp();
      row /= row.sum();
    }
    out.middleRows(begin, count) = weights * v;
  }
  return out;
}

Eigen::MatrixXd mean_of_seen(const matrix& v, bool causal) {
  if (!causal) return v.colwise().mean().replicate(v.rows(), 1);
  Eigen::MatrixXd out(v.rows(), v.cols());
  Eigen::RowVectorXd sum = Eigen::RowVectorXd::Zero(v.cols());
  for (idx_t i = 0; i < v.rows(); ++i) out.row(i) = (sum += v.row(i)) / static_cast<double>(i + 1);
  return out;
}

std::vector<float> load(const std::string& path, std::array<idx_t, 4>& shape) {
  const array x = read_npy(path);
  if (x.shape.size() != 4)
    throw std::runtime_error("attn_bench: " + path + ": expected [batch, heads, length, dim]; found " +
                             std::to_string(x.shape.size()) + " dimensions");
  std::copy_n(x.shape.begin(), 4, shape.begin());
  std::vector<float> numbers(x.values.begin(), x.values.end());
  for (const float number : numbers)
    if (!std::isfinite(number))
      throw std::runtime_error("attn_bench: " + path + ": expected finite numbers; found " + std::to_string(number));
  return numbers;
}

}  // namespace

dataset::dataset(const std::string& folder) : name_(std::filesystem::weakly_canonical(folder).filename().string()) {
  std::array<idx_t, 4> q{}, k{}, v{};
  q_ = load(folder + "/q.npy", q);
  k_ = load(folder + "/k.npy", k);
  v_ = load(folder + "/v.npy", v);
  if (k[0] != q[0] || v[0] != q[0] || k[1] < 1 || q[1] % k[1] != 0 || v[1] != k[1] || k[2] != q[2] || v[2] != q[2] ||
      k[3] != q[3] || q_.empty() || v_.empty())
    throw std::runtime_error("attn_bench: " + folder +
                             ": expected q, k, v of one batch, length and dim, and heads of k " +
                             "and v that divide those of q");
  if (std::ranges::count(v_, 0.F) == std::ssize(v_))
    throw std::runtime_error("attn_bench: " + folder + "/v.npy: expected values that are not all 0, for errors are " +
                             "relative to the result");
  batch_ = q[0], heads_ = q[1], kv_heads_ = k[1], length_ = q[2], dim_ = q[3], dim_v_ = v[3];
}

problem dataset::problem_for(bool causal, const flags& set) const {
  return {length_, heads_, kv_heads_, dim_, dim_v_, causal, set};
}

idx_t dataset::kv_head_of(idx_t head) const { return head / heads_ * kv_heads_ + head % heads_ / (heads_ / kv_heads_); }

const dataset::answers& dataset::exact(form of) const {
  answers& known = exact_[of.causal][of.shared_keys];
  if (known.empty())
    for (idx_t head = 0; head < batch_ * heads_; ++head) {
      const idx_t kv_head = kv_head_of(head);
      const matrix q = rows(q_, head, length_, dim_);
      known.push_back(attend(q, of.shared_keys ? matrix(q.rowwise().normalized()) : rows(k_, kv_head, length_, dim_),
                             rows(v_, kv_head, length_, dim_v_), of));
    }
  return known;
}

double dataset::distance(const std::vector<float>& out, form of) const {
  double wrong = 0, whole = 0;
  for (idx_t head = 0; head < batch_ * heads_; ++head) {
    const Eigen::MatrixXd& expected = exact(of)[static_cast<std::size_t>(head)];
    wrong += (rows(out, head, length_, dim_v_) - expected).squaredNorm();
    whole += expected.squaredNorm();
  }
  return wrong == 0 ? 0 : std::sqrt(wrong / whole);  // of results that are all 0, too
}

double dataset::mean_error(form of) const {
  std::vector<float> out;
  for (idx_t head = 0; head < batch_ * heads_; ++head) {
    const matrix mean = mean_of_seen(rows(v_, kv_head_of(head), length_, dim_v_), of.causal);
    out.insert(out.end(), mean.data(), mean.data() + mean.size());
  }
  return distance(out, of);
}

}  // namespace bench
