#include <attn/core/detail/config.hpp>
namespace attn { inline namespace ATTN_ISA { struct execution; }}
void crosses(attn::execution&) {}
