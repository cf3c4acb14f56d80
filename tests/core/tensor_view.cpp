// A view reads the caller's memory where the caller's own indexing finds it.
#include <attn/core/tensor_view.hpp>

#include <numeric>
#include <vector>

#include "support/catch.hpp"
#include "support/tensor.hpp"

namespace testing::tensor_view_tests {
using attn::tensor_view;

namespace {

template <class M>
bool reads_like(tensor_view<const float> view, const M& m) {
  if (view.extents() != std::array<idx_t, 4>{1, 1, m.rows(), m.cols()}) return false;
  for (idx_t i = 0; i < m.rows(); ++i)
    for (idx_t j = 0; j < m.cols(); ++j)
      if (&view(0, 0, i, j) != m.data() + (&m.coeffRef(i, j) - m.data())) return false;
  return true;
}

using column_major = Eigen::MatrixXf;
using row_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

}  // namespace

TEST_CASE("the default view is null and empty", "[tensor_view]") {
  const tensor_view<float> null;
  CHECK_FALSE(null);
  CHECK(null.empty());
  CHECK(null.size() == 0);
  CHECK(null.extents() == std::array<idx_t, 4>{0, 0, 0, 0});
}

TEST_CASE("a pointer with extents is contiguous, the last axis fastest", "[tensor_view]") {
  std::vector<int> numbers(2 * 3 * 4 * 5);
  std::iota(numbers.begin(), numbers.end(), 0);
  const tensor_view<int> view(numbers.data(), {2, 3, 4, 5});
  CHECK(view);
  CHECK(view.size() == 120);
  CHECK(view.strides() == std::array<idx_t, 4>{60, 20, 5, 1});
  CHECK(view(1, 2, 3, 4) == 119);
  CHECK(view(1, 0, 2, 1) == 71);
  const tensor_view<int, 3> rows(numbers.data(), {2, 3, 20});
  CHECK(rows(1, 1, 7) == 87);
}

TEST_CASE("strides may be anything: gaps, broadcast, backwards", "[tensor_view]") {
  std::vector<int> numbers(24);
  std::iota(numbers.begin(), numbers.end(), 0);
  CHECK(tensor_view<int>(numbers.data(), {1, 2, 3, 2}, {0, 12, 4, 2})(0, 1, 2, 1) == 22);
  CHECK(tensor_view<int>(numbers.data(), {5, 2, 3, 1}, {0, 3, 1, 1})(4, 1, 2, 0) == 5);
  CHECK(tensor_view<int>(numbers.data() + 23, {1, 1, 6, 4}, {0, 0, -4, -1})(0, 0, 5, 3) == 0);
}

TEST_CASE("a view of mutable memory becomes one of const memory", "[tensor_view]") {
  float x = 3;
  const tensor_view<float> view(&x, {1, 1, 1, 1});
  const tensor_view<const float> constant = view;
  CHECK(constant.data() == &x);
  CHECK(constant.strides() == view.strides());
  STATIC_REQUIRE_FALSE(std::is_convertible_v<tensor_view<const float>, tensor_view<float>>);
}

TEST_CASE("Eigen matrices, maps, blocks and refs are [length, dim]", "[tensor_view]") {
  column_major c = column_major::Random(6, 5);
  row_major r = row_major::Random(6, 5);
  CHECK(reads_like(c, c));
  CHECK(reads_like(r, r));

  auto c_block = c.block(1, 2, 3, 2);
  auto r_block = r.block(2, 1, 4, 3);
  CHECK(reads_like(c_block, c_block));
  CHECK(reads_like(r_block, r_block));

  std::vector<float> memory(200);
  Eigen::Map<row_major, 0, Eigen::OuterStride<>> outer(memory.data(), 6, 5, Eigen::OuterStride<>(9));
  Eigen::Map<column_major, 0, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>> both(memory.data(), 6, 5, {30, 3});
  CHECK(reads_like(outer, outer));
  CHECK(reads_like(both, both));

  Eigen::Ref<column_major> ref(c);
  CHECK(reads_like(ref, ref));
  CHECK(tensor_view<const float>(std::as_const(c)).data() == c.data());
}

TEST_CASE("fixed-size and temporary Eigen expressions convert too", "[tensor_view]") {
  Eigen::Matrix<double, 3, 4, Eigen::RowMajor> fixed = Eigen::Matrix<double, 3, 4, Eigen::RowMajor>::Random();
  CHECK(tensor_view<double>(fixed)(0, 0, 2, 1) == fixed(2, 1));
  CHECK(tensor_view<double>(fixed.topRows(2)).extents() == std::array<idx_t, 4>{1, 1, 2, 4});
  CHECK(&attn::as_view(fixed.rightCols(2))(0, 0, 1, 1) == &fixed(1, 3));
}

TEST_CASE("a vector is the last axis of a view of rank 3, and one row or column of rank 4", "[tensor_view]") {
  Eigen::VectorXf v = Eigen::VectorXf::Random(7);
  const tensor_view<float, 3> rows(v);
  CHECK(rows.extents() == std::array<idx_t, 3>{1, 1, 7});
  CHECK(&rows(0, 0, 4) == &v(4));
  row_major r(3, 7);
  const tensor_view<float, 3> strided(r.col(2));
  CHECK(strided.extents() == std::array<idx_t, 3>{1, 1, 3});
  CHECK(&strided(0, 0, 2) == &r(2, 2));
  CHECK(tensor_view<float, 3>(r).extents() == std::array<idx_t, 3>{1, 3, 7});
  CHECK(tensor_view<float>(v).extents() == std::array<idx_t, 4>{1, 1, 7, 1});
}

TEST_CASE("[batch, length, head, dim] memory is seen as [batch, head, length, dim]", "[tensor_view]") {
  std::vector<int> numbers(2 * 5 * 3 * 4);
  std::iota(numbers.begin(), numbers.end(), 0);
  const auto view = attn::blhd_view(numbers.data(), 2, 5, 3, 4);
  CHECK(view.extents() == std::array<idx_t, 4>{2, 3, 5, 4});
  CHECK(view(1, 2, 3, 1) == ((1 * 5 + 3) * 3 + 2) * 4 + 1);
}

TEST_CASE("heads side by side in the columns of a matrix are split without copying", "[tensor_view]") {
  row_major r = row_major::Random(5, 12);
  column_major c = r;
  const auto by_row = attn::split_heads(r, 3);
  const auto by_column = attn::split_heads(c, 3);
  CHECK(by_row.extents() == std::array<idx_t, 4>{1, 3, 5, 4});
  CHECK(&by_row(0, 2, 4, 1) == &r(4, 9));
  CHECK(&by_column(0, 2, 4, 1) == &c(4, 9));
  CHECK(attn::split_heads(std::as_const(r), 1)(0, 0, 1, 11) == r(1, 11));
}

TEST_CASE("a slice narrows one axis", "[tensor_view]") {
  std::vector<int> numbers(120);
  const tensor_view<int> view(numbers.data(), {2, 3, 4, 5});
  const auto middle = view.slice(2, 1, 2);
  CHECK(middle.extents() == std::array<idx_t, 4>{2, 3, 2, 5});
  CHECK(&middle(1, 2, 0, 3) == &view(1, 2, 1, 3));
  CHECK(view.slice(1, 3, 0).empty());
  CHECK(tensor_view<int>().slice(2, 0, 0).data() == nullptr);
}

#if defined(__cpp_lib_mdspan)
TEST_CASE("std::mdspan of rank 2 to 4 fills the last axes", "[tensor_view]") {
  std::vector<float> memory(120);
  const std::mdspan matrix(memory.data(), 6, 5);
  const tensor_view<float> view(matrix);
  CHECK(view.extents() == std::array<idx_t, 4>{1, 1, 6, 5});
  CHECK(&view(0, 0, 3, 2) == &memory[17]);
  const std::mdspan<float, std::dextents<int, 4>, std::layout_left> left(memory.data(), 2, 3, 4, 5);
  CHECK(&tensor_view<const float>(left)(1, 2, 3, 4) == &memory[119]);
  CHECK(tensor_view<const float>(left).stride(0) == 1);
}
#endif

}  // namespace testing::tensor_view_tests
