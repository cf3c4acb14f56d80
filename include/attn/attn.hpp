// attn: everything. Each header also stands alone.
#pragma once

#include <attn/core/random.hpp>
#include <attn/fourier/fnet.hpp>
#include <attn/kernel/linear.hpp>
#include <attn/layers/encoder_block.hpp>
#include <attn/layers/multi_head.hpp>
#include <attn/layers/reversible_block.hpp>
#include <attn/low_rank/linformer.hpp>
#include <attn/low_rank/long_short.hpp>
#include <attn/low_rank/nystrom.hpp>
#include <attn/low_rank/projection.hpp>
#include <attn/softmax/bigbird.hpp>
#include <attn/softmax/block.hpp>
#include <attn/softmax/full_softmax.hpp>
#include <attn/softmax/kv_cache.hpp>
#include <attn/softmax/lsh.hpp>
#include <attn/softmax/merge.hpp>
#include <attn/softmax/pattern_softmax.hpp>
#include <attn/softmax/sliding_window.hpp>
#include <attn/softmax/sliding_window_cache.hpp>
#include <attn/softmax/strided.hpp>
