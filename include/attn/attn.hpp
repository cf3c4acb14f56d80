// attn: everything. Each header also stands alone.
#pragma once

#include <attn/core/random.hpp>
#include <attn/fourier/fnet.hpp>
#include <attn/softmax/bigbird.hpp>
#include <attn/softmax/block.hpp>
#include <attn/softmax/full_softmax.hpp>
#include <attn/softmax/kv_cache.hpp>
#include <attn/softmax/merge.hpp>
#include <attn/softmax/pattern_softmax.hpp>
#include <attn/softmax/sliding_window.hpp>
#include <attn/softmax/sliding_window_cache.hpp>
#include <attn/softmax/strided.hpp>
