// attn: the gradients of softmax attention by the processes of a communicator, block by block
// (distributed_softmax.hpp).
#pragma once

#include <attn/mpi/detail/distributed_softmax.hpp>
#include <attn/softmax/full_softmax_backward.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// full_softmax_gradients whose elements are sums, in the compute type.
template <class S>
struct full_softmax_sums {
  using real = compute_type<S>;
  static constexpr unsigned shared = fields::k | fields::bias | fields::alibi_slopes;

  tensor_view<real> q{}, k{}, v{}, bias{};
  tensor_view<real, 1> alibi_slopes{}, sinks{};
  tensor_view<const real, 3> d_lse{};
  bool accumulate = true;
};

/// What a process wants and lacks: an lse of fast products is none (softmax_backward_call).
template <class S, class Options, class Gradients>
std::uint64_t wants_of(const Options& options, const Gradients& g, const execution& exec) {
  return (options.lse && !uses_fast_products<S>(exec) ? 0 : lacks_lse) | (g.k ? wants_keys : 0) |
         (g.v ? wants_values : 0) | (g.alibi_slopes ? wants_slopes : 0) | (g.sinks ? wants_sinks : 0);
}

template <class S, class Call>
class distributed_softmax_backward {
 public:
  using T = compute_type<S>;

  distributed_softmax_backward(const distributed_softmax<S>& group, const Call& call)
      : group_(group), x_(call), g_(call.gradients), lse_(call.options.lse), exec_(call.forward.exec) {}

  void run() {
    const std::array<idx_t, 4>& o = x_.out.extents();
    if (uses_fast_products<S>(exec_)) lse_ = {};
    const standard_products standard(exec_);
    const bool lacks = group_.any(lacks_lse);
    const auto log_sums = exec_.workspace([&](arena& m) { return m.allocate<T>(lacks ? o[0] * o[1] * o[2] : 0); });
    if (lacks) {  // on another process, at least: that one has its own, and takes part
      const tensor_view<T, 3> lse(*log_sums, {o[0], o[1], o[2]});
      group_.attend(x_.v.slice(3, 0, 0), tensor_view<S>(nullptr, {o[0], o[1], o[2], 0}), lse, x_.forward.terms.score,
                    exec_);
      if (!lse_) lse_ = lse;
    }
    struct memory {
      std::array<key_buffer<S>, 2> keys;
      std::array<key_buffer<T>, 2> sums;
      T *dq, *slopes;
    };
    const idx_t dq_size = g_.q ? x_.q.size() : 0, slopes_size = group_.any(wants_slopes) ? x_.q.extent(1) : 0;
    const auto scratch = exec_.workspace([&](arena& m) {
      return memory{
          .keys = layout_key_buffers<S>(m, x_.k.extents(), x_.v.extents(), group_.keys),
          .sums = layout_key_buffers<T>(m, extents_of(x_.k, wants_keys), extents_of(x_.v, wants_values), group_.keys),
          .dq = m.allocate<T>(dq_size), .slopes = m.allocate<T>(slopes_size)};
    });
    std::fill_n(scratch->dq, dq_size, T(0));
    std::fill_n(scratch->slopes, slopes_size, T(0));
    dq_ = {scratch->dq, x_.q.extents()}, slopes_ = {scratch->slopes, static_cast<std::size_t>(slopes_size)};
    travelling_keys<S> travelling(group_.processes, group_.keys, x_.k, x_.v, scratch->keys);
    travelling_gradients<T> sums(group_.processes, group_.keys, scratch->sums, group_.heads_of_bundle(x_.v.extent(3)));
    for (;; travelling.end_step()) {
      const int step = travelling.step();
      travelling.begin_step();
      sums.begin_step(step);
      const auto here = travelling.here();
      for (std::size_t n = 0; n < sums.bundles(); ++n) {
        const auto to = sums.receive(step, n);
        group_.for_each_call(travelling.source(), [&](const block_call& call) {
          differentiate_block(here, to, sums.first(n), sums.count(n), call);
          travelling.progress();
        });
        sums.send(step, n);
      }
      if (travelling.last()) break;
    }
    const auto own = sums.finish();
    if (g_.q) store(tensor_view<const T>(dq_), g_.q);
    if (g_.k) store(tensor_view<const T>(own.k), g_.k);
    if (g_.v) store(tensor_view<const T>(own.v), g_.v);
    if (group_.any(wants_slopes)) store_sum(slopes_, g_.alibi_slopes);
    if (group_.any(wants_sinks)) store_sum(sink_sums(), g_.sinks);
  }

 private:
  std::array<idx_t, 4> extents_of(const tensor_view<const S>& x, std::uint64_t want) const {
    std::array<idx_t, 4> extents = x.extents();
    if (!group_.any(want)) extents[3] = 0;
    return extents;
  }

  template <class Keys, class Sums>
  void differentiate_block(const Keys& here, const Sums& to, idx_t h, idx_t count, const block_call& call) {
    const auto rows = [&](const auto& x) { return group_.rows(x, h, count, call); };
    const auto columns = [&](const auto& x) { return group_.columns(x, h, count, call); };
    attn::full_softmax_options<S> options;
    group_.set_options(options, h, count, call);
    options.lse = rows(lse_);
    full_softmax_sums<S> sums;
    if (g_.q) sums.q = rows(dq_);
    if (group_.any(wants_keys)) sums.k = columns(to.k);
    if (group_.any(wants_values)) sums.v = columns(to.v);
    const idx_t heads = count * group_.group();
    if (!slopes_.empty()) sums.alibi_slopes = {slopes_.data() + h * group_.group(), {heads}};
    if (g_.d_lse) sums.d_lse = rows(g_.d_lse);
    auto function = function_of_part(x_.forward.terms.score, h * group_.group(), call.shift);
    auto derivative = function_of_part(x_.score_backward, h * group_.group(), call.shift);
    execution_ref reference = exec_;
    const tensor_view<const S> k = columns(here.k), v = columns(here.v);
    auto one = checked_backward_call<attn::full_softmax_options>(group_.processes.name(), rows(x_.q), k, v,
                                                                 rows(x_.out), rows(x_.d_out), sums, options,
                                                                 function, derivative, reference);
    run_full_softmax_backward(one);
  }

  /// Of every head, the part of the own rows: - sum_i e^(sink - lse_i) D_i.
  std::vector<T> sink_sums() const {
    std::vector<T> sums(static_cast<std::size_t>(x_.q.extent(1)), T(0));
    for_each_row(x_.out, [&](idx_t b, idx_t h, idx_t i) {
      const T log_sum = lse_(b, h, i);
      if (log_sum == -std::numeric_limits<T>::infinity()) return;
      const auto o = head_of(x_.out, b, h), d = head_of(x_.d_out, b, h);
      const T dot = row_dot<T>(o.row(i), o.col_stride, d.row(i), d.col_stride, o.cols);
      const auto head = static_cast<std::size_t>(h);
      const T weight = std::exp((std::min)(group_.sinks[head] - log_sum, T(0)));
      sums[head] -= weight * (g_.d_lse ? dot - g_.d_lse(b, h, i) : dot);
    });
    return sums;
  }

  void store(const tensor_view<const T>& sums, const tensor_view<S>& to) const {
    for_each_row(to, [&](idx_t b, idx_t h, idx_t i) {
      for (idx_t d = 0; d < to.extent(3); ++d) store_gradient(to(b, h, i, d), sums(b, h, i, d), g_.accumulate);
    });
  }
  /// The sum of all processes' lists, in their order.
  void store_sum(std::span<const T> own, const tensor_view<T, 1>& to) const {
    const std::vector<T> all = group_.processes.all_gather(own.data(), own.size());
    for (std::size_t h = 0; to && h < own.size(); ++h) {
      T sum = 0;
      for (std::size_t n = h; n < all.size(); n += own.size()) sum += all[n];
      store_gradient(to(static_cast<idx_t>(h)), sum, g_.accumulate);
    }
  }

  const distributed_softmax<S>& group_;
  const Call& x_;
  decltype(Call::gradients) g_;
  tensor_view<T, 3> lse_;
  execution& exec_;
  tensor_view<T> dq_{};
  std::span<T> slopes_{};
};

}}}  // namespace attn::ATTN_ISA::detail
