// says: fnet_options<float>
#include <attn/fourier/fnet.hpp>

#ifdef WRONG
const attn::fnet_options<float> options{.causal = true};
#else
const attn::fnet_options<float> options{};
#endif
