#include "laws/operators/aft.hpp"

namespace testing {
namespace {

struct aft_conv_entry {
  std::string name;
  index height = 1, width = 9;
  bool image = false, causal = false, gate = true;  // an image of one column: a shorter sequence is a smaller one
};

template <class T>
T kernel_value(const aft_conv_entry& entry, index h, index down, index right) {
  if (std::abs(down) > entry.height / 2 || std::abs(right) > entry.width / 2) return T(0);
  const index mixed = 5 * h + 3 * down + 7 * right + 100;
  if (mixed % 7 == 0 && (down != 0 || right != 0)) return -std::numeric_limits<T>::infinity();
  return static_cast<T>(mixed % 17) / 8 - 1;
}

template <class T>
T bias_of(const aft_conv_entry& entry, index h, index i, index j) {
  return entry.image ? kernel_value<T>(entry, h, j - i, 0) : kernel_value<T>(entry, h, 0, j - i);
}

template <class T>
std::shared_ptr<tensor<T>> kernels(const aft_conv_entry& entry, const law_shape& s, bool zero = false) {
  auto w = std::make_shared<tensor<T>>(1, s.heads, entry.height, entry.width);
  for (index h = 0; h < s.heads && !zero; ++h)
    for (index r = 0; r < entry.height; ++r)
      for (index c = 0; c < entry.width; ++c)
        (*w)(0, h, r, c) = kernel_value<T>(entry, s.first_head + h, r - entry.height / 2, c - entry.width / 2);
  return w;
}

template <class T>
bound<T> bind_aft_conv(const aft_conv_entry& entry, const law_shape& s, bool zero = false) {
  return [entry, w = kernels<T>(entry, s, zero)](const law_call<T>& call) {
    attn::aft_conv_options<T> options;
    options.causal = entry.causal, options.gate = entry.gate, options.lengths = call.lengths;
    if (entry.image) options.grid = attn::token_grid{call.q.extent(2), 1};
    compiled_aft_conv<T>::call(call.q, call.k, call.v, call.out, kernel_view(std::as_const(*w), entry.image), options,
                               *call.execution);
  };
}

}  // namespace

template <class T>
void add_aft_conv(std::vector<law_operator<T>>& all) {
  for (const aft_conv_entry& entry : {aft_conv_entry{"aft_conv", 1, 9},
                                      {"aft_conv ungated", 1, 41, false, false, false},
                                      {"aft_conv causal", 1, 41, false, true, true},
                                      {"aft_conv causal, ungated", 1, 9, false, true, false},
                                      {"aft_conv of an image", 5, 3, true, false, true}}) {
    auto op = aft_operator<T>(entry.name, entry.causal, entry.gate);
    op.bind = [=](const law_shape& s) { return bind_aft_conv<T>(entry, s); };
    op.sees = [=](const law_shape& s, index, index h, index i, index j) {
      return (!entry.causal || j <= i) && !std::isinf(bias_of<T>(entry, s.first_head + h, i, j));
    };
    if (entry.gate)
      op.limits = {{"as full", [=](const law_shape& s) { return bind_aft_conv<T>(entry, s); },
                    [=](const law_shape& s) {
                      return bind_aft_full<T>(s, entry.causal,
                                              [=](index h, index i, index j) { return bias_of<T>(entry, h, i, j); });
                    }},
                   {"no biases", [=](const law_shape& s) { return bind_aft_conv<T>(entry, s, true); },
                    [=](const law_shape&) { return bind_aft_simple<T>(entry.causal, true); }}};
    if (entry.causal)
      op.stream = [=](const law_shape& s) -> bound<T> {
        auto state = std::make_shared<attn::aft_window_state<T>>(s.batch, s.heads, s.dim, entry.width / 2 + 1);
        return [=, w = kernels<T>(entry, s)](const law_call<T>& call) {
          compiled_aft_conv<T>::step(*state, call.q, call.k, call.v, call.out, kernel_view(std::as_const(*w), false),
                                     {.gate = entry.gate}, *call.execution);
        };
      };
    all.push_back(op);
  }
}
template void add_aft_conv(std::vector<law_operator<float>>&);
#if !defined(ATTN_TEST_FEW_TYPES)
template void add_aft_conv(std::vector<law_operator<double>>&);
#endif

}  // namespace testing
