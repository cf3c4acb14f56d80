#include "laws/operators/aft.hpp"

namespace testing::aft_conv_law {
namespace {

struct aft_conv_entry {
  std::string name;
  idx_t height = 1, width = 9;
  bool image = false, causal = false, gate = true;
  idx_t most_columns = 1;  // of an image; of one column: a shorter sequence is a smaller one
  bool one_key = false;    // for all channels of a head
  bool masked = false;
};

// As many as divide the length.
idx_t columns(const aft_conv_entry& entry, idx_t length) {
  idx_t most = entry.most_columns;
  while (length % most != 0) --most;
  return most;
}

template <class T>
T kernel_value(const aft_conv_entry& entry, idx_t h, idx_t down, idx_t right) {
  if (std::abs(down) > entry.height / 2 || std::abs(right) > entry.width / 2) return T(0);
  const idx_t mixed = 5 * h + 3 * down + 7 * right + 100;
  if (mixed % 7 == 0 && (down != 0 || right != 0)) return -std::numeric_limits<T>::infinity();
  return static_cast<T>(mixed % 17) / 8 - 1;
}

template <class T>
T bias_of(const aft_conv_entry& entry, idx_t length, idx_t h, idx_t i, idx_t j) {
  if (!entry.image) return kernel_value<T>(entry, h, 0, j - i);
  const idx_t across = columns(entry, length);
  return kernel_value<T>(entry, h, j / across - i / across, j % across - i % across);
}

// The key of a head's first channel, for one or all of them.
template <class T>
in_view<T> one_key(const in_view<T>& k, idx_t channels) {
  return {k.data(), {k.extent(0), k.extent(1), k.extent(2), channels}, {k.stride(0), k.stride(1), k.stride(2), 0}};
}

tensor<double> first_channel(const tensor<double>& k) {
  tensor<double> one(k.batch(), k.heads(), k.length(), 1);
  for (idx_t b = 0; b < k.batch(); ++b)
    for (idx_t h = 0; h < k.heads(); ++h)
      for (idx_t j = 0; j < k.length(); ++j) one(b, h, j, 0) = k(b, h, j, 0);
  return one;
}

template <class T>
std::shared_ptr<tensor<T>> kernels(const aft_conv_entry& entry, const law_shape& s, bool zero = false) {
  auto w = std::make_shared<tensor<T>>(1, s.heads, entry.height, entry.width);
  for (idx_t h = 0; h < s.heads && !zero; ++h)
    for (idx_t r = 0; r < entry.height; ++r)
      for (idx_t c = 0; c < entry.width; ++c)
        (*w)(0, h, r, c) = kernel_value<T>(entry, s.first_head + h, r - entry.height / 2, c - entry.width / 2);
  return w;
}

// call: of a forward or a backward pass.
template <class T>
attn::aft_conv_options<T> options_of(const aft_conv_entry& entry, const shared_aft_mask& mask, const auto& call) {
  attn::aft_conv_options<T> options;
  options.causal = entry.causal, options.gate = entry.gate, options.key_mask = mask->seen.view();
  call.set_lengths(options);
  const idx_t length = call.q.extent(2), across = columns(entry, length);
  if (entry.image) options.grid = attn::token_grid{length / across, across};
  return options;
}

template <class T>
bound<T> bind_aft_conv(const aft_conv_entry& entry, const law_shape& s, bool zero = false) {
  return [entry, w = kernels<T>(entry, s, zero),
          mask = std::make_shared<aft_mask>(entry.masked, s)](const law_call<T>& call) {
    const in_view<T> k = entry.one_key ? one_key(call.k, 1) : call.k;
    compiled_aft_conv<T>::call(call.q, k, call.v, call.out, kernel_view(std::as_const(*w), entry.image),
                               options_of<T>(entry, mask, call), *call.execution);
  };
}

template <class T>
backward_binder<T> aft_conv_backward(const aft_conv_entry& entry) {
  return [entry](const law_shape& s) {
    const auto w = kernels<T>(entry, s), dw = std::make_shared<tensor<T>>(*w);
    return [=, mask = std::make_shared<aft_mask>(entry.masked, s)](const law_backward_call<T>& call) {
      in_view<T> k = call.k;
      out_view<T> dk = call.dk;
      if (entry.one_key) {  // the other channels have no part in anything
        k = k.slice(3, 0, 1), dk = dk.slice(3, 0, 1);
        for (idx_t b = 0; b < k.extent(0); ++b)
          for (idx_t h = 0; h < k.extent(1); ++h)
            for (idx_t j = 0; j < k.extent(2); ++j)
              for (idx_t d = 1; d < call.k.extent(3); ++d) call.dk(b, h, j, d) = T(0);
      }
      const auto of_w = kernel_view(std::as_const(*w), entry.image);
      compiled_aft_conv<T>::backward(
          call.q, k, call.v, of_w, call.d_out,
          {.q = call.dq, .k = dk, .v = call.dv, .w = {dw->data.data(), of_w.extents(), of_w.strides()}},
          options_of<T>(entry, mask, call), *call.execution);
      call.give(dw->data);
    };
  };
}

template <class T>
void add_aft_conv(std::vector<law_operator<T>>& all) {
  for (const aft_conv_entry& entry : {aft_conv_entry{"aft_conv", 1, 9},
                                      {"aft_conv ungated", 1, 41, false, false, false},
                                      {"aft_conv causal", 1, 41, false, true, true},
                                      {"aft_conv causal, ungated", 1, 9, false, true, false},
                                      {"aft_conv of an image of one column", 5, 3, true, false, true},
                                      {"aft_conv of an image", 5, 7, true, false, true, 16},
                                      {"aft_conv, one key a head", 1, 15, false, false, true, 1, true},
                                      {"aft_conv causal with a key_mask", 1, 9, false, true, true, 1, false, true}}) {
    auto op = aft_operator<T>(entry.name, entry.causal, entry.gate);
    op.padding = entry.most_columns == 1;
    op.bind = [=](const law_shape& s) { return bind_aft_conv<T>(entry, s); };
    op.backward = aft_conv_backward<T>(entry);
    op.reference = [=](const law_shape& s) {
      reference::aft_conv_options o{{entry.causal, entry.gate, {}, aft_mask(entry.masked, s).of_reference},
                                    cast<double>(*kernels<T>(entry, s))};
      if (entry.image) o.columns = columns(entry, s.keys);
      return [=](const law_reference_call& call) {
        reference::aft_conv_options given = o;
        call.set_lengths(given);
        given.w = call.parameter(o.w);
        const tensor<double> k = entry.one_key ? first_channel(call.k) : call.k;
        return reference::result{reference::aft_conv(call.q, k, call.v, given), {}};
      };
    };
    op.sees = [=](const law_shape& s, idx_t b, idx_t h, idx_t i, idx_t j) {
      if (entry.masked && !key_mask_sees(s.first_batch + b, j)) return false;
      return (!entry.causal || j <= i) && !std::isinf(bias_of<T>(entry, s.keys, s.first_head + h, i, j));
    };
    if (entry.gate && !entry.masked)
      op.limits = {{"as full", op.bind, [=](const law_shape& s) -> bound<T> {
                      const bound<T> full = bind_aft_full<T>(s, entry.causal, [=](idx_t h, idx_t i, idx_t j) {
                        return bias_of<T>(entry, s.keys, h, i, j);
                      });
                      if (!entry.one_key) return full;
                      return [full](law_call<T> call) {
                        call.k = one_key(call.k, call.v.extent(3));
                        full(call);
                      };
                    }}};
    if (entry.gate && !entry.masked && !entry.one_key)
      op.limits.push_back({"no biases", [=](const law_shape& s) { return bind_aft_conv<T>(entry, s, true); },
                           [=](const law_shape&) { return bind_aft_simple<T>(entry.causal, true); }});
    if (entry.causal)
      op.stream = [=](const law_shape& s) -> bound<T> {
        auto state = std::make_shared<attn::aft_conv_state<T>>(
            attn::state_extents{.batch = s.batch, .heads = s.heads, .dim = s.dim},
            attn::aft_conv_state_options{.width = entry.width});
        return [=, w = kernels<T>(entry, s), tokens = std::make_shared<idx_t>(0),
                mask = std::make_shared<aft_mask>(entry.masked, s)](const law_call<T>& call) {
          compiled_aft_conv<T>::step(*state, call.q, call.k, call.v, call.out, kernel_view(std::as_const(*w), false),
                                     {.lengths = call.lengths, .gate = entry.gate,
                                      .key_mask = mask->seen.view(*tokens, call.k.extent(2))},
                                     *call.execution);
          *tokens += call.k.extent(2);
        };
      };
    if (!entry.gate)
      op.long_rows = {{"no biases", [=](const law_shape& s) { return bind_aft_conv<T>(entry, s, true); }}};
    all.push_back(op);
  }
}
const law_entries entries("aft_conv", [](auto& all) { add_aft_conv(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  for (bool causal : {false, true})
    all.push_back(stored_aft<compiled_aft_conv, S>(std::string("aft_conv") + (causal ? " causal" : ""), causal,
                                              stored::drawn<S>(13, 1, 1, 1, 21), [](auto&) {}));
}
const stored_entries stored_form("aft_conv", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::aft_conv_law
