// attn: the gradients of attention-free mixing with biases.
//
// What aft_window_run.hpp does with keys and rows, with the roles changed: rows beyond the reach of every window of a
// block of keys see these keys without a bias, and their sums are computed once, as key_sums of g and h. They overflow
// no more than those of keys: such a row sees the key, so e^k <= den.
#pragma once

#include <attn/aft/detail/aft_key_block.hpp>
#include <attn/aft/detail/aft_window_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The biases of all rows towards a block of keys, and their gradient.
template <class T>
struct window_key_bias {
  aft_window_bias<T> rows;  // of any block
  aft_bias_sink<T> gradient;

  idx_t seen(idx_t t, idx_t begin, idx_t count) const {
    return rows.grid.causal ? std::clamp(t + 1 - begin, idx_t(0), count) : count;
  }
  aft_window_bias<T> of(idx_t t) const {
    aft_window_bias<T> block = rows;
    block.r = t / rows.grid.columns, block.i = (t - block.r * rows.grid.columns) / block_rows;
    return block;
  }
  idx_t row(idx_t t) const { return t % rows.grid.columns % block_rows; }

  void fill(idx_t t, idx_t begin, idx_t count, T* to) const {
    const idx_t n = seen(t, begin, count);
    of(t).fill(row(t), begin, n, to);
    std::fill(to + n, to + count, -std::numeric_limits<T>::infinity());
  }
  void add_gradient(idx_t t, idx_t begin, idx_t count, const T* values) const {
    const auto place = of(t).find(row(t), begin, seen(t, begin, count));
    if (place.low < place.high) gradient.add(place.row, place.column, place.high - place.low, values + place.low);
  }
};

template <class T>
struct aft_window_backward_driver {
  static constexpr idx_t most_segments = 64;  // of the keys: each has a separate sum of the gradient of a kernel

  const aft_tensors<T>& x;
  const aft_gradient_elements<T>& elements;
  aft_window_grid grid;

  void run(execution& exec) const {
    aft_window_driver<T> forward{x, grid};
    auto work = forward.work();
    work.operations *= 3;
    const auto limit = exec.limit_threads(work);
    const bool biased = x.wants(x.dw), keys_too = biased || x.wants(x.dk) || x.wants(x.dv);
    const bool kernel = biased && grid.layout == aft_window_layout::kernel;
    const idx_t parts = x.parts(), blocks = grid.lines * grid.blocks();
    const idx_t segments = kernel ? (std::min)(blocks, most_segments) : blocks;
    const idx_t entries = kernel ? x.dw.extents[2] * x.dw.extents[3] : 0;
    aft_stored_rows<T> rows;
    aft_bias_gradients<T> biases;
    aft_window_sums<T> beside;
    T* partial = nullptr;  // [segments][entries]
    exec.shared_scratch([&](arena& memory) {
      forward.allocate(memory);
      const idx_t most = forward.bundles.most;
      rows = aft_stored_rows<T>::layout(memory, x.batch * x.heads, parts, x.length, most * parts);
      biases = aft_bias_gradients<T>::layout(memory, x, most, kernel);
      if (grid.layout == aft_window_layout::square) biases.columns = biases.rows;
      auto of_keys = grid;
      of_keys.of_keys = true;
      beside = aft_window_sums<T>::layout(memory, of_keys, grid.whole ? 0 : most, parts);
      partial = memory.allocate<T>(segments * entries);
      return 0;
    });
    const bool all_written = kernel || (grid.whole && !grid.causal && x.lengths.empty());
    if (!all_written || forward.bundles.count == 0) biases.clear(exec);
    rows.find_highest(x, elements, exec);
    forward.sum_outside(exec);
    for (idx_t b = 0; b < forward.bundles.count; ++b) {
      const head_bundle bundle = forward.bundles.list[b];
      forward.attend(b, b + 1, exec, [&](const auto& block, idx_t keys) {
        rows.add(x, elements, block, keys, [&](idx_t r) { return block.bias.sees_beyond(r); });
      });
      if (!keys_too) continue;
      beside.sum(
          grid.whole ? 0 : std::ssize(bundle), exec,
          [&](idx_t head, idx_t begin, idx_t end, key_sums<T>* to) {
            for (idx_t p = 0; p < parts; ++p) rows.add_plain(bundle, head * parts + p, begin, end, to[p]);
          },
          [&](idx_t) { return bundle[0].length; });
      biases.begin(forward.bundles, b, exec);
      const idx_t real = grid.blocks_of(bundle[0].length);
      const idx_t used = real > 0 ? ceil_div(real * segments, blocks) : 0;  // segments with keys
      exec.for_each(used, [&](idx_t segment, int worker) {
        aft_bias_sink<T> sink = biases.sink;
        if (kernel) sink.sums = partial + segment * entries, std::fill_n(sink.sums, entries, T(0));
        for (idx_t n = segment * blocks / segments; n < (std::min)(real, (segment + 1) * blocks / segments); ++n)
          add_keys_block(bundle, rows, beside, sink, n, forward.bundles.most, exec, worker);
      });
      for (idx_t segment = 0; segment < used; ++segment)
        for (idx_t n = 0; n < entries; ++n) biases.sink.sums[n] += partial[segment * entries + n];
      biases.end(forward.bundles, b, exec);
    }
    clear_all_padding(x, exec);
  }

 private:
  /// Block n of the keys of a bundle.
  void add_keys_block(const head_bundle& bundle, const aft_stored_rows<T>& rows, const aft_window_sums<T>& beside,
                      const aft_bias_sink<T>& sink, idx_t n, idx_t most, execution& exec, int worker) const {
    const idx_t r = n / grid.blocks(), i = n % grid.blocks(), length = bundle[0].length, parts = x.parts();
    const idx_t count = (std::min)(grid.columns_of(r, length) - i * block_rows, block_rows);
    if (count <= 0) return;
    sums_array<T> outside;
    const bool biased = x.wants(x.dw);
    const auto block = exec.scratch(worker, [&](arena& memory) {
      outside = sums_array<T>::layout(memory, grid.whole ? 0 : most, parts);
      return aft_key_block<T>::layout(memory, most * parts, biased);
    });
    for (idx_t head = 0; head < std::ssize(bundle) && !grid.whole; ++head)
      beside.outside(head, length, r, i, outside, head);
    aft_window_bias<T> ranges{
        .w = bundle[0].w, .elements = *x.elements, .grid = grid, .keys = length, .r = r, .i = i};
    const window_key_bias<T> bias{ranges, sink};
    const aft_key_gradients<T, window_key_bias<T>> keys{
        block, x, elements, rows, bundle, bias, r * grid.columns + i * block_rows, count, biased};
    keys.start();
    ranges.grid = beside.grid;
    for (idx_t line = ranges.first_line(); line < ranges.end_line(); ++line)
      if (const auto [begin, end] = ranges.keys_of(line); begin < end) keys.add_rows(begin, end - begin);
    keys.finish(grid.whole ? nullptr : outside.data);
  }
};

template <class T>
void run_aft_window_backward(const aft_tensors<T>& call, const aft_window_grid& grid, execution& exec) {
  aft_window_backward_driver<T>{call, *call.gradients, grid}.run(exec);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) void run_aft_window_backward(const aft_tensors<T>&, const aft_window_grid&, execution&)
#include <attn/core/detail/compiled.hpp>
