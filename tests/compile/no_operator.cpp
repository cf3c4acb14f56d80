// What every operator includes, and calls none: the yardstick of compile times.
#include <attn/core/execution.hpp>

void nothing() { attn::execution serial; }
