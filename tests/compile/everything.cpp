// All headers, and no operator called.
#include <attn/attn.hpp>

void nothing() { attn::execution serial; }
