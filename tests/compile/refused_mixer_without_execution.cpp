// says: f and g must be callable as f(x, out, execution)
#include <attn/layers/reversible_block.hpp>

#ifdef WRONG
const auto f = [](auto, auto) {};
#else
const auto f = [](auto, auto, attn::execution&) {};
#endif

void call(Eigen::MatrixXf& x) { attn::reversible_block(x, x, f, f); }
