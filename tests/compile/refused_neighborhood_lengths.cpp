// says: neighborhood_options<float>
#include <attn/softmax/neighborhood.hpp>

const attn::neighborhood_options<float> options{.grid = {4, 4}, .kernel = {3, 3},
#ifdef WRONG
                                                .lengths = {},
#endif
};
