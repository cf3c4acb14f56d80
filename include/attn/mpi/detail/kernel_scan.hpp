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
#include <attn/kernel/detail/sums_run.hpp>
#include <attn/mpi/detail/state_scan.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The states of a call, of all processes: what the forward and the backward pass have in common.
template <class T>
struct spread_states {
  using sums_type = kernel_sums<T>;

  /// The sums of a segment; causal, once those before it are known, these.
  struct stored_sums {
    sums_type sums;
    T decay;
  };

  const distributed_sequence& sequence;
  const kernel_call<T>& call;
  execution& exec;
  const sums_kernel<T> kernel{call};
  idx_t item_heads = call.shape.batch * call.heads;  // heads of sums of all items, item by item
  idx_t segments = most_segments(call.shape.keys);
  const holder_list& holders = sequence.key_holders();

  idx_t unit = 0, units = 0;  // heads that are computed together, and how many such units there are
  idx_t summed_first = 0;     // units that are summed up before they are attended to
  sums_type* keys = nullptr;  // of every head of every item: those that came before, then with what is here
  idx_t stored_heads = 0;
  stored_sums* stored = nullptr;  // [heads][segments]

  std::size_t state_bytes() const {
    return static_cast<std::size_t>(sums_type::count(call.map->features, call.shape.dim_v, call.parts())) * sizeof(T);
  }
  stored_sums& stored_of(idx_t item_head, idx_t n) const { return stored[item_head % stored_heads * segments + n]; }
  idx_t batch_of(idx_t item_head) const { return item_head / call.heads; }
  idx_t head_in_item(idx_t item_head) const { return item_head % call.heads; }
  idx_t segments_of(idx_t item_head) const { return call.segments(batch_of(item_head)); }

  sums_type* allocate_states(arena& memory) const {
    return memory.allocate_list(item_heads, [&](arena& m) { return call.allocate_sums(m); });
  }
  stored_sums* allocate_stored(arena& memory, idx_t count) const {
    return memory.allocate_list(count, [&](arena& m) { return stored_sums{call.allocate_sums(m), T(1)}; });
  }
  void layout_keys(arena& memory, idx_t heads) {
    keys = allocate_states(memory), stored_heads = heads, stored = allocate_stored(memory, heads * segments);
  }

  /// MPI makes progress on pending messages only while it is called; worker 0 is the calling thread.
  static void progress(state_messages& messages, int worker) {
    if (worker == 0) messages.progress();
  }
  /// body(item_head, segment, its first key, its end, worker) for all segments of heads [first, last).
  template <class Body>
  void for_each_segment(idx_t first, idx_t last, state_messages& messages, const Body& body) const {
    exec.for_each((last - first) * segments, [&](idx_t task, int worker) {
      const idx_t item_head = first + task / segments, n = task % segments, b = batch_of(item_head);
      if (const idx_t begin = n * call.segment(b); n < segments_of(item_head))
        body(item_head, n, begin, (std::min)(begin + call.segment(b), call.lengths.keys(b)), worker);
      progress(messages, worker);
    });
  }

  /// The states of all heads are expected, in `list`.
  void expect(state_messages& messages, sums_type* list) const {
    for (idx_t item_head = 0; item_head < item_heads; ++item_head)
      messages.expect(list[item_head].values, state_bytes());
  }
  /// Each of the states [first, last): received, add(item_head), sent on.
  template <class Add>
  void scan(state_messages& messages, idx_t first, idx_t last, sums_type* list, const Add& add) const {
    for (idx_t item_head = first; item_head < last; ++item_head) {
      messages.receive(item_head);
      add(item_head);
      messages.send(list[item_head].values, state_bytes());
    }
  }
  void expect_keys(state_messages& messages) const {
    for (idx_t item_head = 0; item_head < item_heads; ++item_head)
      keys[item_head].empty = !sequence.has_earlier_keys(batch_of(item_head));
    expect(messages, keys);
  }
  /// The keys of heads [first, last) are summed up: `stored`; and added to what came before.
  void sum_up_keys(idx_t first, idx_t last, state_messages& messages) const {
    for_each_segment(first, last, messages, [&](idx_t item_head, idx_t n, idx_t begin, idx_t end, int worker) {
      stored_sums& x = stored_of(item_head, n);
      const auto s = kernel.scratch(exec, worker);
      x.sums.clear();
      x.decay = kernel.add_keys_to(x.sums, T(1), batch_of(item_head), head_in_item(item_head), begin, end, s);
    });
    const auto s = kernel.scratch(exec, 0);
    scan(messages, first, last, keys, [&](idx_t item_head) {
      sums_type& sums = keys[item_head];
      for (idx_t n = 0; n < segments_of(item_head); ++n) {
        stored_sums& x = stored_of(item_head, n);
        if (!call.causal) {
          kernel.add_segment(sums, x.decay, x.sums, s);
        } else {
          if (!sums.empty) combine(sums, x.decay, x.sums, x.sums, s.factors);
          std::swap(sums, x.sums);
        }
      }
    });
  }
  /// The process that has the totals of all heads sends them to all others; is_empty(b) says which are 0.
  template <class Empty>
  void broadcast_sums(state_messages& messages, sums_type* totals, const Empty& is_empty) const {
    expect(messages, totals);
    scan(messages, 0, item_heads, totals, [](idx_t) {});
    for (idx_t item_head = 0; item_head < item_heads; ++item_head)
      totals[item_head].empty = is_empty(batch_of(item_head));
  }
  /// The first queries of item b that see no key of any process.
  idx_t queries_without_keys(idx_t b) const {
    if (sequence.keys(b) == 0) return call.lengths.queries(b);
    if (!call.causal || sequence.has_earlier_keys(b)) return 0;
    return std::max<idx_t>(call.lengths.queries(b) - call.lengths.keys(b), 0);
  }
};

/// One call, after its checks.
template <class T>
struct kernel_scan : spread_states<T> {
  using base = spread_states<T>;
  using base::batch_of, base::call, base::exec, base::head_in_item, base::holders, base::item_heads, base::kernel,
      base::keys, base::segments_of, base::sequence, base::summed_first, base::unit, base::units;
  using segment_sums = typename sums_kernel<T>::segment_sums;

  segment_sums* own = nullptr;  // one a worker
  state_messages messages = holders.chain(sequence.group());

  idx_t first_of(idx_t u) const { return (std::min)(u * unit, item_heads); }
  kernel_scratch<T> scratch(int worker) const { return kernel.scratch(exec, worker); }
  void layout(arena& memory) {
    call.map->layout(memory, item_heads);
    this->layout_keys(memory, call.causal ? first_of(summed_first) : unit);
    own = memory.allocate_list(exec.active_threads(), [&](arena& m) { return kernel.layout_sums(m); });
  }
  void sum_up(idx_t u) { this->sum_up_keys(first_of(u), first_of(u + 1), messages); }
  /// A unit whose keys have been summed up.
  void attend_stored(idx_t u) {
    this->for_each_segment(first_of(u), first_of(u + 1), messages,
                           [&](idx_t item_head, idx_t n, idx_t begin, idx_t end, int worker) {
                             segment_sums& x = own[worker];
                             kernel.attend_segment(batch_of(item_head), head_in_item(item_head), begin, end, true,
                                                   scratch(worker), this->stored_of(item_head, n).sums, x.own, x.total);
                           });
  }
  /// A unit whose keys have not.
  void attend_and_sum_up(idx_t u) {
    const idx_t first = first_of(u), end_of_unit = first_of(u + 1);
    for (idx_t item_head = first; item_head < end_of_unit; ++item_head) messages.receive(item_head);
    exec.for_each(end_of_unit - first, [&](idx_t number, int worker) {
      segment_sums& x = own[worker];
      const idx_t item_head = first + number, b = batch_of(item_head), all = segments_of(item_head);
      const auto s = scratch(worker);
      for (idx_t n = 0; n < all; ++n) {
        const idx_t begin = n * call.segment(b), end = (std::min)(begin + call.segment(b), call.lengths.keys(b));
        const bool last = holders.last() && n == all - 1;
        const T decay =
            kernel.attend_segment(b, head_in_item(item_head), begin, end, last, s, keys[item_head], x.own, x.total);
        if (!last) kernel.add_segment(keys[item_head], decay, x.own, s);
        this->progress(messages, worker);
      }
    });
    for (idx_t item_head = first; item_head < end_of_unit; ++item_head)
      messages.send(keys[item_head].values, this->state_bytes());
  }

  void run_causal() {
    if (!holders.holds()) return;
    for (idx_t u = 0; u < summed_first; ++u) sum_up(u);
    const idx_t first = (std::min)(holders.place, summed_first);
    for (idx_t u = 0; u < first; ++u) attend_stored(u);
    for (idx_t u = summed_first; u < units; ++u) attend_and_sum_up(u);
    for (idx_t u = first; u < summed_first; ++u) attend_stored(u);
    messages.finish();
  }
  void run_bidirectional() {
    for (idx_t u = 0; u < units && holders.holds(); ++u) sum_up(u);
    messages.finish();
    auto totals = holders.tree(sequence.group());
    this->broadcast_sums(totals, keys, [&](idx_t b) { return sequence.keys(b) == 0; });
    const idx_t blocks = ceil_div(call.shape.queries, kernel_chunk);
    exec.for_each(item_heads * blocks, [&](idx_t task, int worker) {
      const idx_t item_head = task / blocks, block = task % blocks, b = batch_of(item_head);
      if (block < call.blocks(b) && !keys[item_head].empty)
        kernel.attend_queries(b, head_in_item(item_head), block, scratch(worker), keys[item_head]);
    });
    totals.finish();
  }
  /// prepare() fills the shared memory of the map.
  template <class Prepare>
  void run(const Prepare& prepare) {
    const auto limit = exec.limit_threads(call.work());
    const idx_t threads = exec.active_threads();
    // Threads share heads where there are too few, as in sums_run.hpp: then by segments.
    const bool share = threads > 1 && item_heads < 2 * threads && item_heads % threads != 0;
    unit = (std::min)(share ? item_heads : threads, item_heads);
    units = unit > 0 ? (item_heads + unit - 1) / unit : 0;
    summed_first = share ? units : holders.last() ? 0 : (std::min)(units, holders.count() - 1);
    exec.shared_scratch([&](arena& memory) {
      layout(memory);
      return 0;
    });
    prepare();
    this->expect_keys(messages);
    call.causal ? run_causal() : run_bidirectional();
    for (idx_t b = 0; b < call.shape.batch; ++b)
      for (idx_t h = 0; h < call.shape.heads; ++h) {  // padding, and rows that see no key
        call.out.head(b, h).clear_rows(0, this->queries_without_keys(b));
        call.out.head(b, h).clear_rows(call.lengths.queries(b), call.shape.queries);
      }
  }
};

/// Checks a call of an operator on one of several processes: make(call_views, parameters with the lengths of this
/// process's tokens, settings) does it and returns the call. Beside what it has for one process, the operator's
/// check_options() says what it cannot do over several, and settings() adds what must be the same on all of them.
template <class S, class Operator, class Make, class T = compute_type<S>>
kernel_call<T> check_spread(distributed_sequence& sequence, const kernel_views<S>& x, Operator& one, const Make& make) {
  kernel_call<T> call;
  const kernel_parameters<T>& given = one.given;
  const idx_t batch = std::max<idx_t>(x.q.extent(0), 0);
  const process_shape own{.batch = x.q.extent(0), .heads = x.q.extent(1), .kv_heads = x.k.extent(1),
                          .dim = x.q.extent(3), .dim_v = x.v.extent(3), .element_bytes = element_code<S>,
                          .queries = x.q.extent(2), .keys = x.k.extent(2)};
  agree_on(sequence.group(), own, [&](common_settings& settings) {
    call_views check{sequence.group().name()};
    if (given.key_mask) check.fail("no key_mask over processes", "one");
    one.check_options(check);
    const auto lengths = check_lengths(
        check, {.batch = batch, .queries = sequence.whole_queries(), .keys = sequence.whole_keys()},
        given.both_lengths, given.query_lengths, given.key_lengths);
    sequence.set_lengths(batch, lengths);
    auto own_given = given;
    own_given.both_lengths = {};
    own_given.query_lengths = sequence.own_queries(), own_given.key_lengths = sequence.own_keys();
    call = make(check, own_given, settings);
    one.validate(check, call);
    one.settings(settings);
    settings.add(lengths);
    settings.add(given.causal), settings.add(given.normalise), settings.add(static_cast<double>(given.eps));
    settings.add(given.given_scale), settings.add(static_cast<double>(given.norm_eps));
    settings.add(given.feature_eps), settings.add(given.center_keys), settings.add(static_cast<double>(given.kernel));
    settings.add(static_cast<double>(call.gate.extent(1)));  // of an empty range it may be null
    settings.add(width<T>);                                       // of the memory that is sent
    if (x.features) settings.add_elements(x.features);
  });
  if (call.causal) sequence.check_causal(call.shape.batch);
  return call;
}

/// An operator of random features, which shares out all of its options.
template <class T, template <class> class Features, template <class> class FeaturesBackward>
struct spread_features {
  kernel_parameters<T> given;

  static constexpr bool usable() { return true; }
  void check_options(const validator&) const {}
  void validate(const validator&, kernel_call<T>&) const {}
  void settings(common_settings&) const {}
  Features<T> map(const kernel_call<T>& call) const { return Features<T>(call); }
  auto back(const Features<T>& map) const { return FeaturesBackward<T>(map); }
};

/// Fills the shared memory of a map: most need nothing of other processes.
template <class Map>
void prepare_spread(Map& map, const distributed_sequence&, execution& exec) {
  map.prepare(exec);
}

/// A call of an operator of feature sums: Operator has its checks and its map.
template <class S, class Operator, class T = compute_type<S>>
void run_spread(const char* name, MPI_Comm communicator, const kernel_views<S>& x, Operator one, execution& exec) {
  if constexpr (Operator::usable()) {
    distributed_sequence sequence(name, communicator, x.q.extent(2), x.k.extent(2));
    kernel_call<T> call = check_spread(
        sequence, x, one,
        [&](call_views& check, const auto& given, common_settings&) { return check_kernel(check, x, given); });
    auto map = one.map(call);
    call.map = &map;
    if (sequence.group().size() == 1) return sums_driver<T>{call}.run(exec);
    kernel_scan<T>{{sequence, call, exec}}.run([&] { prepare_spread(map, sequence, exec); });
  }
}

}}}  // namespace attn::ATTN_ISA::detail
