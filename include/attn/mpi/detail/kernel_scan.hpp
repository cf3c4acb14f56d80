// attn: kernel attention over a sequence spread over processes: the driver's segments, and the sums before each.
//
// Bidirectional: each process sums up its segments, head by head, adds them to the sums of the process before it, and
// sends them on; the last one has the total and sends it to all processes, and queries read it.
//
// Causal: queries need the sums before their segment, and so those of all earlier processes. These could sum up what
// they have twice, once for the others and once beside their own queries; or each process could wait for the one before
// it, head by head. Here only the first heads are summed up twice, as many as there are processes to wait for: the time
// for which the p-th process must wait, it spends on the queries of p of those heads.
//
//   1. for the first P - 1 heads   sum up the segments, receive, add, send; then p of them: attend
//   2. for all other heads         receive, attend and sum up, send
//   3. of the first heads          attend the rest
//
// All sums are taken as one process takes them, so bits are those of one process if each begins at the start of one of
// its segments.
#pragma once

#include <attn/kernel/detail/kernel_checks.hpp>
#include <attn/mpi/detail/state_scan.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// One call, after its checks.
template <class T>
struct kernel_scan {
  using segment_sums = typename kernel_call<T>::segment_sums;

  /// The sums of a segment; causal, once those before it are known, these.
  struct stored_sums {
    kernel_sums<T> sums;
    T decay;
  };

  const spread_sequence& sequence;
  const kernel_call<T>& call;
  execution& exec;
  idx_t item_heads = call.shape.batch * call.heads;  // heads of sums of all items, item by item
  idx_t segments = ceil_div(call.shape.keys, segment_of(call.shape.keys));
  idx_t unit = 0, units = 0;  // heads that are computed together, and how many such units there are
  idx_t twice = 0;            // units whose keys are summed up before they are attended to
  kernel_sums<T>* running = nullptr;  // of every head of every item: what came before, then that with what is here
  stored_sums* stored = nullptr;      // [heads of a unit, or of `twice` units][segments]
  segment_sums* own = nullptr;        // one a worker
  const holder_list& holders = sequence.key_holders();
  state_messages messages = holders.chain(sequence.group());

  std::size_t state_bytes() const {
    return static_cast<std::size_t>(kernel_sums<T>::count(call.map->features, call.shape.dim_v, call.log_scaled())) *
           sizeof(T);
  }
  stored_sums& stored_of(idx_t item_head, idx_t n) const {
    return stored[(call.causal ? item_head : item_head % unit) * segments + n];
  }
  idx_t batch_of(idx_t item_head) const { return item_head / call.heads; }
  idx_t segments_of(idx_t item_head) const { return call.segments(batch_of(item_head)); }
  kernel_scratch<T> scratch(int worker) const { return call.scratch(exec, worker); }

  void layout(arena& memory) {
    const auto sums = [&](arena& m) {
      return kernel_sums<T>::layout(m, call.map->features, call.shape.dim_v, call.log_scaled());
    };
    call.map->layout(memory, item_heads);
    running = memory.allocate_list(item_heads, sums);
    stored = memory.allocate_list((call.causal ? std::min(twice * unit, item_heads) : unit) * segments,
                                  [&](arena& m) { return stored_sums{sums(m), T(1)}; });
    own = memory.allocate_list(exec.active_threads(), [&](arena& m) { return call.layout_sums(m, true); });
  }

  /// body(item_head, worker) for the heads of a unit.
  template <class Body>
  void for_each_item_head(idx_t u, const Body& body) {
    const idx_t first = u * unit;
    exec.for_each(std::min(unit, item_heads - first), [&](idx_t n, int worker) { body(first + n, worker); });
  }
  /// body(item_head, segment, its first key, its end, worker) for all segments of a unit.
  template <class Body>
  void for_each_segment(idx_t u, const Body& body) {
    const idx_t first = u * unit;
    exec.for_each(std::min(unit, item_heads - first) * segments, [&](idx_t task, int worker) {
      const idx_t item_head = first + task / segments, n = task % segments, b = batch_of(item_head);
      if (const idx_t begin = n * call.segment(b); n < segments_of(item_head))
        body(item_head, n, begin, std::min(begin + call.segment(b), call.lengths.keys(b)), worker);
      progress(worker);
    });
  }
  /// MPI makes progress on pending messages only while it is called; worker 0 is the calling thread.
  void progress(int worker) {
    if (worker == 0) messages.progress();
  }

  /// Units whose keys are summed up: `stored`; and added to what came before.
  void sum_up(idx_t u) {
    for_each_segment(u, [&](idx_t item_head, idx_t n, idx_t begin, idx_t end, int worker) {
      stored_sums& x = stored_of(item_head, n);
      x.decay = call.sum_up(batch_of(item_head), item_head % call.heads, begin, end, scratch(worker), x.sums);
    });
    for (idx_t item_head = u * unit; item_head < std::min((u + 1) * unit, item_heads); ++item_head) {
      messages.receive(item_head);
      const auto s = scratch(0);
      for (idx_t n = 0; n < segments_of(item_head); ++n) {
        stored_sums& x = stored_of(item_head, n);
        if (!call.causal) {
          call.add_segment(running[item_head], x.decay, x.sums, s);
        } else {
          if (!running[item_head].empty) combine(running[item_head], x.decay, x.sums, x.sums, s.factors);
          std::swap(running[item_head], x.sums);
        }
      }
      messages.send(running[item_head].values, state_bytes());
    }
  }

  /// A unit whose keys have been summed up.
  void attend_stored(idx_t u) {
    for_each_segment(u, [&](idx_t item_head, idx_t n, idx_t begin, idx_t end, int worker) {
      segment_sums& x = own[worker];
      call.attend_segment(batch_of(item_head), item_head % call.heads, begin, end, true, scratch(worker),
                          stored_of(item_head, n).sums, x.own, x.total);
    });
  }

  /// A unit whose keys have not.
  void attend_and_sum_up(idx_t u) {
    for (idx_t item_head = u * unit; item_head < std::min((u + 1) * unit, item_heads); ++item_head)
      messages.receive(item_head);
    for_each_item_head(u, [&](idx_t item_head, int worker) {
      segment_sums& x = own[worker];
      const idx_t b = batch_of(item_head), keys = call.lengths.keys(b), all = segments_of(item_head);
      const auto s = scratch(worker);
      for (idx_t n = 0; n < all; ++n) {
        const idx_t begin = n * call.segment(b), end = std::min(begin + call.segment(b), keys);
        const bool last = holders.last() && n == all - 1;
        const T decay =
            call.attend_segment(b, item_head % call.heads, begin, end, last, s, running[item_head], x.own, x.total);
        if (!last) call.add_segment(running[item_head], decay, x.own, s);
        progress(worker);
      }
    });
    for (idx_t item_head = u * unit; item_head < std::min((u + 1) * unit, item_heads); ++item_head)
      messages.send(running[item_head].values, state_bytes());
  }

  void run_causal() {
    if (!holders.holds()) return;
    for (idx_t u = 0; u < twice; ++u) sum_up(u);
    const idx_t first = std::min(holders.place, twice);
    for (idx_t u = 0; u < first; ++u) attend_stored(u);
    for (idx_t u = twice; u < units; ++u) attend_and_sum_up(u);
    for (idx_t u = first; u < twice; ++u) attend_stored(u);
    messages.finish();
  }

  void run_bidirectional() {
    for (idx_t u = 0; u < units && holders.holds(); ++u) sum_up(u);
    messages.finish();
    auto totals = holders.tree(sequence.group());
    for (idx_t item_head = 0; item_head < item_heads; ++item_head)
      totals.expect(running[item_head].values, state_bytes());
    for (idx_t item_head = 0; item_head < item_heads; ++item_head) {
      totals.receive(item_head);
      totals.send(running[item_head].values, state_bytes());
      running[item_head].empty = sequence.keys(batch_of(item_head)) == 0;
    }
    exec.for_each(item_heads * blocks(), [&](idx_t task, int worker) {
      const idx_t item_head = task / blocks(), block = task % blocks(), b = batch_of(item_head);
      if (block < call.blocks(b) && !running[item_head].empty)
        call.attend_queries(b, item_head % call.heads, block, scratch(worker), running[item_head]);
    });
    totals.finish();
  }
  idx_t blocks() const { return (call.shape.queries + kernel_chunk - 1) / kernel_chunk; }

  /// Zeros for the rows of padding and those that see no key.
  void pad() const {
    for (idx_t b = 0; b < call.shape.batch; ++b) {
      const idx_t queries = call.lengths.queries(b), keys = call.lengths.keys(b);
      const idx_t unseeing = sequence.keys(b) == 0 ? queries
                             : call.causal && !sequence.has_earlier_keys(b) ? std::max<idx_t>(queries - keys, 0)
                                                                            : 0;
      for (idx_t h = 0; h < call.shape.heads; ++h) {
        call.out.head(b, h).clear_rows(0, unseeing);
        call.out.head(b, h).clear_rows(queries, call.shape.queries);
      }
    }
  }

  /// prepare() fills the shared memory of the map.
  template <class Prepare>
  void run(const Prepare& prepare) {
    const auto limit = exec.limit_threads(call.work());
    const idx_t threads = exec.active_threads();
    // Threads share heads where there are too few, as in driver.hpp: then by segments.
    const bool share = threads > 1 && item_heads < 2 * threads && item_heads % threads != 0;
    unit = std::min(share ? item_heads : threads, item_heads);
    units = unit > 0 ? (item_heads + unit - 1) / unit : 0;
    twice = share ? units : holders.last() ? 0 : std::min(units, holders.count() - 1);
    exec.shared_scratch([&](arena& memory) {
      layout(memory);
      return 0;
    });
    prepare();
    for (idx_t item_head = 0; item_head < item_heads; ++item_head) {
      running[item_head].empty = !sequence.has_earlier_keys(batch_of(item_head));
      messages.expect(running[item_head].values, state_bytes());
    }
    call.causal ? run_causal() : run_bidirectional();
    pad();
  }
};

/// A call of kernel attention on one of several processes. What the operator itself checks, check(validator, settings)
/// does: it fills in the call and adds the numbers that must be the same on all processes.
template <class S>
class spread_kernel_call {
 public:
  using T = compute_type<S>;

  spread_kernel_call(const char* name, MPI_Comm communicator, const kernel_views<S>& x)
      : sequence_(name, communicator, x.q.extent(2), x.k.extent(2)), x_(x) {}

  /// make(call_views, options with the lengths of this process's tokens, settings) checks them and returns the call.
  template <class Options, class Make>
  kernel_call<T> check(const Options& options, const tensor_view<const T, 3>& gate, const Make& make) {
    kernel_call<T> call;
    const tensor_view<const S>&q = x_.q, &k = x_.k;
    const idx_t batch = std::max<idx_t>(q.extent(0), 0);
    const process_shape own{.batch = q.extent(0), .heads = q.extent(1), .kv_heads = k.extent(1), .dim = q.extent(3),
                            .dim_v = x_.v.extent(3), .element_bytes = element_code<S>, .queries = q.extent(2),
                            .keys = k.extent(2)};
    agree_on(sequence_.group(), own, [&](common_settings& settings) {
      call_views check(sequence_.group().name());
      if (options.key_mask) check.fail("no key_mask over processes", "one");
      const auto lengths = check_lengths(
          check, {.batch = batch, .queries = sequence_.whole_queries(), .keys = sequence_.whole_keys()}, options);
      sequence_.set_lengths(batch, lengths);
      Options own_options = options;
      own_options.lengths = {};
      own_options.query_lengths = sequence_.own_queries(), own_options.key_lengths = sequence_.own_keys();
      call = make(check, own_options, settings);
      settings.add(lengths);
      settings.add(options.causal), settings.add(static_cast<double>(options.eps));
      settings.add(static_cast<double>(gate.extent(1)));  // of an empty range it may be null
      settings.add(width<T>);  // of the memory that is sent
      if (x_.features) settings.add_elements(x_.features);
    });
    if (call.causal) sequence_.check_causal(call.shape.batch);
    return call;
  }

  /// Without `prepare` of its own a map needs nothing of other processes.
  template <class Prepare>
  void run(kernel_call<T>& call, feature_map<T>& map, execution& exec, const Prepare& prepare) {
    call.map = &map;
    if (sequence_.group().size() == 1) return call.run(exec);
    kernel_scan<T>{.sequence = sequence_, .call = call, .exec = exec}.run(prepare);
  }
  void run(kernel_call<T>& call, feature_map<T>& map, execution& exec) {
    run(call, map, exec, [&] { map.prepare(exec); });
  }
  const spread_sequence& sequence() const { return sequence_; }

 private:
  spread_sequence sequence_;
  kernel_views<S> x_;
};

/// Of the options of linear, those that processes do not share out.
template <class Options>
void check_spread_linear(const validator& check, const Options& o) {
  using real = typename Options::real;
  if (o.scale != real(1)) check.fail("scale 1 over processes", static_cast<double>(o.scale));
  if (o.log_decay) check.fail("decay in place of log_decay over processes", "log_decay");
  if (o.bonus) check.fail("no bonus over processes", "one");
  if (o.initial_state || o.initial_weights || o.final_state || o.final_weights)
    check.fail("no initial or final state over processes", "one");
}

}}}  // namespace attn::ATTN_ISA::detail
