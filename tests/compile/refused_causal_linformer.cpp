// says: linformer_options<float>
#include <attn/low_rank/linformer.hpp>

#ifdef WRONG
const attn::linformer_options<float> options{.causal = true};
#else
const attn::linformer_options<float> options{};
#endif
