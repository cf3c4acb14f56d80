// attn: a scan of states over processes: each needs the sum of all that came before its own tokens, or of all there is.
//
// A sum of states is taken in the order of the sequence, segment by segment, as one process would: floating-point sums
// depend on the order, and this one depends on the sequence alone. So a process waits for the state of the one before
// it, adds its own segments, and sends the result on: one message of one state from each process to the next. What a
// process has to compute for it, the sums of its segments, it computes before it waits.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/mpi/detail/communicator.hpp>

#include <deque>
#include <exception>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// States in transit: each is received from one process, or none, and sent on to some. They arrive in the order in
/// which they were expected, and are sent in the same order everywhere.
class state_messages {
 public:
  static constexpr int none = -1;

  state_messages(const process_communicator& group, int from, std::vector<int> to)
      : comm_(group.get()), from_(from), to_(std::move(to)) {}

  /// The next state will lie at `state`, once received.
  void expect(void* state, std::size_t bytes) {
    auto& message = arriving_.emplace_back();
    if (from_ != none) message.receive(state, bytes, from_, 0, comm_);
  }
  /// Waits for the state that was the n-th to be expected.
  void receive(idx_t n) { arriving_[static_cast<std::size_t>(n)].wait(); }
  /// The state must stay as it is until finish().
  void send(const void* state, std::size_t bytes) {
    for (int process : to_) leaving_.send(state, bytes, process, 0, comm_);
  }
  void progress() { leaving_.progress(); }
  void finish() { leaving_.wait(); }

 private:
  MPI_Comm comm_;
  int from_;
  std::vector<int> to_;
  std::deque<message_list> arriving_;
  message_list leaving_;
};

/// One state: receives it, add(), sends it on.
template <class Add>
void pass_on(state_messages messages, void* state, std::size_t bytes, const Add& add) {
  messages.expect(state, bytes);
  messages.receive(0);
  add();
  messages.send(state, bytes);
  messages.finish();
}

/// From process `root` to all others by a tree: each receives it from one process and sends it to up to log2 P.
inline state_messages tree_from(int root, const process_communicator& group) {
  const int size = group.size(), place = (group.rank() - root + size) % size;  // in the tree
  std::vector<int> to;
  for (int step = 1; step < size && (place & step) == 0; step *= 2)
    if (place + step < size) to.insert(to.begin(), (place + step + root) % size);
  return {group, place == 0 ? state_messages::none : ((place & (place - 1)) + root) % size, std::move(to)};
}

/// Those of the processes that hold some of the tokens.
struct holder_list {
  std::vector<int> list;
  idx_t place = -1;  // of this process among them

  holder_list(const sequence_split& split, int rank) {
    for (int p = 0; p < split.processes(); ++p)
      if (split.length(p) > 0) {
        if (p == rank) place = static_cast<idx_t>(list.size());
        list.push_back(p);
      }
  }
  idx_t count() const { return static_cast<idx_t>(list.size()); }
  bool holds() const { return place >= 0; }
  bool first() const { return place == 0; }
  bool last() const { return place == count() - 1; }

  /// From each to the next one, or the one before.
  state_messages chain(const process_communicator& group, bool reverse = false) const {
    const int before = place > 0 ? list[static_cast<std::size_t>(place - 1)] : state_messages::none,
              next = holds() && !last() ? list[static_cast<std::size_t>(place + 1)] : state_messages::none,
              to = reverse ? before : next;
    return {group, reverse ? next : before, to == state_messages::none ? std::vector<int>{} : std::vector<int>{to}};
  }
  /// From the last one, which has the sum of all, to every process.
  state_messages tree(const process_communicator& group) const {
    return tree_from(list.empty() ? 0 : list.back(), group);
  }
};

/// A sequence of which each process holds the tokens of one range, in the order of their ranks; and the true lengths of
/// its batch items, of which each process has a part.
class distributed_sequence {
 public:
  distributed_sequence(const char* name, MPI_Comm communicator, idx_t queries, idx_t keys)
      : group_(name, communicator),
        gathered_(group_.all_gather(std::array<idx_t, 2>{std::max<idx_t>(queries, 0), std::max<idx_t>(keys, 0)})),
        queries_(column(0), false), keys_(column(1), false), query_holders_(queries_, group_.rank()),
        key_holders_(keys_, group_.rank()) {}

  const process_communicator& group() const { return group_; }
  idx_t whole_queries() const { return queries_.tokens(); }
  idx_t whole_keys() const { return keys_.tokens(); }

  /// Takes the true lengths, those of the whole sequence, after they were checked.
  void set_lengths(idx_t batch, const sequence_lengths& whole) {
    whole_ = whole;
    own_queries_.clear(), own_keys_.clear();
    for (idx_t b = 0; b < batch; ++b) {
      own_queries_.push_back(true_length(queries_, whole.queries(b), group_.rank()));
      own_keys_.push_back(true_length(keys_, whole.keys(b), group_.rank()));
    }
  }
  /// Those of this process.
  const std::vector<idx_t>& own_queries() const { return own_queries_; }
  const std::vector<idx_t>& own_keys() const { return own_keys_; }
  /// Those of the whole.
  idx_t queries(idx_t b) const { return whole_.queries(b); }
  idx_t keys(idx_t b) const { return whole_.keys(b); }
  /// Whether batch item b has keys or queries before those of this process, or keys after them.
  bool has_earlier_keys(idx_t b) const { return keys(b) > 0 && keys_.of(group_.rank())[0].begin > 0; }
  bool has_earlier_queries(idx_t b) const { return queries(b) > 0 && queries_.of(group_.rank())[0].begin > 0; }
  bool has_later_keys(idx_t b) const {
    return keys(b) > keys_.of(group_.rank())[0].begin + keys_.length(group_.rank());
  }

  /// Throws, on every process alike, unless the keys between a query's position and the end of an earlier process are
  /// on the query's own process.
  void check_causal(idx_t batch) const {
    for (int p = 0; p < group_.size(); ++p)
      for (idx_t b = 0; b < batch; ++b) {
        const idx_t queries = true_length(queries_, whole_.queries(b), p), first_key = keys_.of(p)[0].begin,
                    first = queries_.of(p)[0].begin + whole_.keys(b) - whole_.queries(b), end = first + queries,
                    end_keys = first_key + true_length(keys_, whole_.keys(b), p);
        if (queries == 0 || (std::max<idx_t>(end, 0) == end_keys && (first_key == 0 || first >= first_key))) continue;
        validator(group_.name())
            .fail({"causal queries at the positions of the last keys of their process, ", first_key, " to ",
                        end_keys},
                  error_text{first, " to ", end, " on process ", p});
      }
  }

  const holder_list& query_holders() const { return query_holders_; }
  const holder_list& key_holders() const { return key_holders_; }

  /// The state of `bytes` bytes becomes the sum over all processes on every one of them: add() adds what this process
  /// has to what came before it.
  template <class Add>
  void add_in_order(void* state, std::size_t bytes, const Add& add) const {
    if (key_holders_.holds()) pass_on(key_holders_.chain(group_), state, bytes, add);
    pass_on(key_holders_.tree(group_), state, bytes, [] {});
  }

 private:
  std::vector<idx_t> column(std::size_t n) const {
    std::vector<idx_t> lengths;
    for (const auto& one : gathered_) lengths.push_back(one[n]);
    return lengths;
  }
  static idx_t true_length(const sequence_split& split, idx_t whole, int process) {
    return std::clamp<idx_t>(whole - split.of(process)[0].begin, 0, split.length(process));
  }

  process_communicator group_;
  std::vector<std::array<idx_t, 2>> gathered_;
  sequence_split queries_, keys_;
  sequence_lengths whole_{};
  std::vector<idx_t> own_queries_, own_keys_;
  holder_list query_holders_, key_holders_;
};

/// Numbers that must be the same on all processes; there may be more of them than places.
struct common_settings {
  process_shape& shape;
  int count = 0;

  void add(double x) {
    double& place = shape.settings[count++ % process_shape::settings_count];
    std::uint64_t hash = std::bit_cast<std::uint64_t>(place) ^ std::bit_cast<std::uint64_t>(x);
    hash *= 0x9e3779b97f4a7c15;
    place = std::bit_cast<double>(hash ^ hash >> 32);  // every bit of every number counts
  }
  template <class T>
  void add(const std::optional<T>& x) {
    add(static_cast<double>(x.has_value())), add(x ? static_cast<double>(*x) : 0.0);
  }
  void add(const sequence_lengths& x) { add(checksum(x.given_queries)), add(checksum(x.given_keys)); }
  /// Checks a parameter that must have the same elements on all processes.
  template <class S>
  void add_elements(const tensor_view<const S, 3>& x) {
    std::uint64_t sums[4] = {};  // independent of one another, which is four times as fast as one
    for (idx_t h = 0; h < x.extent(0); ++h)
      for (idx_t r = 0; r < x.extent(1); ++r)
        for (idx_t d = 0; d < x.extent(2); ++d) {
          std::uint64_t bits = 0;
          std::memcpy(&bits, &x(h, r, d), sizeof(S));
          sums[d % 4] = (sums[d % 4] ^ bits) * 0x9e3779b97f4a7c15;
          sums[d % 4] ^= sums[d % 4] >> 29;
        }
    add(static_cast<double>((sums[0] + 3 * sums[1] + 5 * sums[2] + 7 * sums[3]) >> 12));
    for (int axis = 0; axis < 3; ++axis) add(static_cast<double>(x.extent(axis)));
  }
};

/// Runs check(common_settings&) here, and compares with the other processes what it and `own` say: throws the same
/// std::invalid_argument on all of them, or on none.
template <class Check>
void agree_on(const process_communicator& group, process_shape own, const Check& validate) {
  std::exception_ptr wrong;
  try {
    common_settings settings{own};
    validate(settings);
  } catch (const std::exception&) {
    wrong = std::current_exception();
  }
  agree(group, own, [&] {
    if (wrong) std::rethrow_exception(wrong);
  });
}

}}}  // namespace attn::ATTN_ISA::detail
