// attn: the activation of lightning_indexer.
#pragma once

#include <attn/core/tensor_view.hpp>

namespace attn { inline namespace ATTN_ISA {

/// What products become before the heads are added up.
enum class indexer_activation { relu, none };

}}  // namespace attn::ATTN_ISA
