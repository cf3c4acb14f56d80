namespace Eigen {
struct half;
template <class>
struct Matrix;
}  // namespace Eigen
void fine(const Eigen::half*) {}
void crosses(const Eigen::half*, const Eigen::Matrix<float>&) {}
