// says: nystrom_options<float>
#include <attn/low_rank/nystrom.hpp>

#ifdef WRONG
const attn::nystrom_options<float> options{.causal = true};
#else
const attn::nystrom_options<float> options{};
#endif
