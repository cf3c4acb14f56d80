// says first: attn: indices are a tensor_view, a tensor or an Eigen matrix of std::int32_t or std::int64_t
#include <attn/core/index_view.hpp>

#ifdef WRONG
using number = float;
#else
using number = std::int32_t;
#endif

attn::index_view call(const Eigen::Matrix<number, Eigen::Dynamic, Eigen::Dynamic>& lists) { return lists; }
