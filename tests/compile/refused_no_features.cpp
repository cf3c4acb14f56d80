// says: performer and rfa take random features after out
#include <attn/kernel/performer.hpp>

void call(const Eigen::MatrixXf& q, const Eigen::MatrixXf& features, Eigen::MatrixXf& out) {
#ifdef WRONG
  (void)features;
  attn::performer(q, q, q, out, {.causal = true});
#else
  attn::performer(q, q, q, out, features, {.causal = true});
#endif
}
