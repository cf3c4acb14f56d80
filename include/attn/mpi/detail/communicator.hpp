// attn: the processes of a communicator, the comparison of a call between them, their messages, and which tokens of a
// sequence each holds.
#pragma once

#include <attn/core/detail/check.hpp>

#ifndef __cpp_exceptions
#error "attn over processes needs exceptions: a call that is refused on one process is refused on all"
#endif

#include <mpi.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <vector>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Bytes this thread's calls have sent to other processes so far.
inline std::size_t& sent_bytes() {
  thread_local std::size_t count = 0;
  return count;
}

/// A copy of a communicator, so that messages of the caller, also with MPI_ANY_SOURCE, do not match those of attn. All
/// its processes make the copy, in their first call on the communicator; it is attached to the communicator, and freed
/// with it. Errors of MPI end the job, because return values of MPI are not checked.
inline MPI_Comm private_copy(MPI_Comm communicator) {
  static const int key = [] {
    const auto free_copy = [](MPI_Comm, int, void* value, void*) {
      const std::unique_ptr<MPI_Comm> copy(static_cast<MPI_Comm*>(value));
      return MPI_Comm_free(copy.get());
    };
    int made = MPI_KEYVAL_INVALID;
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, free_copy, &made, nullptr);
    return made;
  }();
  void* value = nullptr;
  int found = 0;
  MPI_Comm_get_attr(communicator, key, &value, &found);
  if (found) return *static_cast<MPI_Comm*>(value);
  auto copy = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
  if (MPI_Comm_dup(communicator, copy.get()) != MPI_SUCCESS) throw std::runtime_error("attn: MPI_Comm_dup failed");
  MPI_Comm_set_errhandler(*copy, MPI_ERRORS_ARE_FATAL);
  MPI_Comm_set_attr(communicator, key, copy.get());
  return *copy.release();
}

/// The processes of one call. Throws std::invalid_argument where there is nothing to talk through, on every process
/// alike: a null communicator is null everywhere.
class process_communicator {
 public:
  process_communicator(const char* name, MPI_Comm communicator) : name_(name), comm_(communicator) {
    const validator check{name};
    int ready = 0, over = 0;
    MPI_Initialized(&ready);
    MPI_Finalized(&over);
    if (!ready || over) check.fail("MPI between MPI_Init and MPI_Finalize", over ? "it after" : "it before");
    if (comm_ == MPI_COMM_NULL) check.fail("a communicator", "MPI_COMM_NULL");
    int between_groups = 0;
    MPI_Comm_test_inter(comm_, &between_groups);
    if (between_groups) check.fail("a communicator of one group", "an intercommunicator");
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    if (size_ > 1) comm_ = private_copy(comm_);
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  int next() const { return (rank_ + 1) % size_; }
  int before() const { return (rank_ + size_ - 1) % size_; }
  /// What messages go through.
  MPI_Comm get() const { return comm_; }
  const char* name() const { return name_; }

  /// `count` of each process, in order.
  template <class X>
  std::vector<X> all_gather(const X* own, std::size_t count) const {
    static_assert(std::is_trivially_copyable_v<X>);
    const auto processes = static_cast<std::size_t>(size_);
    std::vector<X> all(processes * count);
    const int bytes = static_cast<int>(count * sizeof(X));
    MPI_Allgather(own, bytes, MPI_BYTE, all.data(), bytes, MPI_BYTE, comm_);
    sent_bytes() += (processes - 1) * count * sizeof(X);
    return all;
  }
  template <class X>
  std::vector<X> all_gather(const X& own) const {
    return all_gather(&own, 1);
  }

 private:
  const char* name_;
  MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
};

/// The description of a call that a process sends to the others. Everything but the lengths and the wanted results must
/// be the same on all processes.
struct process_shape {
  static constexpr int settings_count = 16;

  idx_t batch = 0, heads = 0, kv_heads = 0, dim = 0, dim_v = 0, element_bytes = 0, queries = 0, keys = 0;
  std::uint64_t wants = 0;  // bits: what this process wants computed, or does not have
  /// Options that are one for all: numbers by their value, lists by a checksum.
  double settings[settings_count] = {};
  char error[256] = {};  // the error that the process itself found
};

/// A number for the element types of a call.
template <class S>
inline constexpr idx_t element_code =
    std::same_as<S, double> ? 8 : std::same_as<S, float> ? 4 : std::same_as<S, Eigen::half> ? 2 : 3;

/// A checksum of a list of numbers, to tell whether processes have the same.
template <class T>
double checksum(std::span<const T> list) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (T x : list)
    for (unsigned char byte : std::bit_cast<std::array<unsigned char, sizeof(T)>>(x))
      hash = (hash ^ byte) * 0x100000001b3;
  return static_cast<double>(hash >> 12) + static_cast<double>(list.size());
}

/// Runs check(), then compares with what the other processes bring. Where one of them found something wrong, or brings
/// something else than process 0, all throw the same std::invalid_argument, and none waits for another.
template <class Check>
std::vector<process_shape> agree(const process_communicator& group, process_shape own, const Check& validate) {
  try {
    validate();
  } catch (const std::exception& error) {
    std::strncpy(own.error, error.what(), sizeof(own.error) - 1);
  }
  std::vector<process_shape> all = group.all_gather(own);
  const validator all_check(group.name());
  for (std::size_t p = 0; p < all.size(); ++p)
    if (*all[p].error) throw std::invalid_argument(error_text{all[p].error, " (process ", p, ")"}.c_str());
  const process_shape& first = all[0];
  for (std::size_t p = 1; p < all.size(); ++p) {
    const process_shape& one = all[p];
    const auto same = [&](const char* what, idx_t wanted, idx_t found) {
      if (found != wanted) all_check.fail({what, " on all processes as on process 0: ", wanted},
                                          error_text{found, " on process ", p});
    };
    same("a batch", first.batch, one.batch);
    same("heads", first.heads, one.heads);
    same("key heads", first.kv_heads, one.kv_heads);
    same("a query dim", first.dim, one.dim);
    same("a value dim", first.dim_v, one.dim_v);
    if (first.element_bytes != one.element_bytes)
      all_check.fail("the element type of process 0 on all processes", error_text{"another on process ", p});
    // By bits, so that NaN equals itself.
    if (!std::equal(
            std::begin(first.settings), std::end(first.settings), std::begin(one.settings),
            [](double a, double b) { return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b); }))
      all_check.fail("the same options on all processes", error_text{"others on process ", p});
  }
  return all;
}

/// Messages in progress: the destructor waits for all of them, so that an exception leaves none behind.
class message_list {
 public:
  message_list() = default;
  message_list(const message_list&) = delete;
  message_list& operator=(const message_list&) = delete;
  ~message_list() { wait(); }

  void send(const void* data, std::size_t bytes, int to, int tag, MPI_Comm comm) {
    each_message(bytes, [&](std::size_t begin, int count) {
      MPI_Isend(static_cast<const char*>(data) + begin, count, MPI_BYTE, to, tag, comm, &requests_.emplace_back());
    });
    sent_bytes() += bytes;
  }
  void receive(void* data, std::size_t bytes, int from, int tag, MPI_Comm comm) {
    each_message(bytes, [&](std::size_t begin, int count) {
      MPI_Irecv(static_cast<char*>(data) + begin, count, MPI_BYTE, from, tag, comm, &requests_.emplace_back());
    });
  }
  /// Lets MPI make progress on them.
  void progress() {
    int done = 0;
    const int count = static_cast<int>(requests_.size());
    if (count > 0) MPI_Testall(count, requests_.data(), &done, MPI_STATUSES_IGNORE);
  }
  void wait() {
    if (!requests_.empty()) MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
    requests_.clear();
  }

 private:
  /// Counts of MPI are int.
  template <class Body>
  static void each_message(std::size_t bytes, const Body& body) {
    constexpr std::size_t most = std::size_t(1) << 30;
    for (std::size_t begin = 0; begin < bytes; begin += most)
      body(begin, static_cast<int>((std::min)(most, bytes - begin)));
  }

  std::vector<MPI_Request> requests_;
};

/// Tokens [begin, begin + length) of the whole sequence, which are `local` and the next ones of their process.
struct sequence_range {
  idx_t begin = 0, length = 0, local = 0;
};

/// Token at which part `part` of `parts` equal ones begins.
inline idx_t part_begin(idx_t tokens, idx_t part, idx_t parts) {
  return tokens / parts * part + tokens % parts * part / parts;
}

/// The ranges of every process: one after another; or, in zigzag order, of 2 P equal parts of the sequence the parts p
/// and 2 P - 1 - p for process p, so that causal work is the same for all.
class sequence_split {
 public:
  sequence_split() = default;
  sequence_split(std::span<const idx_t> lengths, bool zigzag)
      : zigzag_(zigzag), lengths_(lengths.begin(), lengths.end()) {
    idx_t at = 0;
    for (idx_t n : lengths_) begins_.push_back(at), at += n;
    tokens_ = at;
  }

  idx_t tokens() const { return tokens_; }
  idx_t length(int process) const { return lengths_[static_cast<std::size_t>(process)]; }
  /// Of the process that has most.
  idx_t most() const { return lengths_.empty() ? 0 : *std::max_element(lengths_.begin(), lengths_.end()); }
  int processes() const { return static_cast<int>(lengths_.size()); }

  /// How many tokens this process must hold.
  static idx_t zigzag_length(idx_t tokens, int process, int processes) {
    const auto parts = of_zigzag(tokens, process, processes);
    return parts[0].length + parts[1].length;
  }
  static std::array<sequence_range, 2> of_zigzag(idx_t tokens, int process, int processes) {
    const idx_t parts = 2 * processes, late = parts - 1 - process;
    sequence_range a{part_begin(tokens, process, parts), 0, 0}, b{part_begin(tokens, late, parts), 0, 0};
    a.length = part_begin(tokens, process + 1, parts) - a.begin;
    b.length = part_begin(tokens, late + 1, parts) - b.begin, b.local = a.length;
    return {a, b};
  }

  std::array<sequence_range, 2> of(int process) const {
    if (zigzag_) return of_zigzag(tokens_, process, processes());
    return {sequence_range{begins_[static_cast<std::size_t>(process)], length(process), 0}, sequence_range{}};
  }

  void validate(const process_communicator& group, const char* what) const {
    for (int p = 0; zigzag_ && p < processes(); ++p) {
      const idx_t wanted = zigzag_length(tokens_, p, processes());
      if (length(p) != wanted)
        validator(group.name())
            .fail({what, " in zigzag order: ", wanted, " of ", tokens_, " tokens on process ", idx_t(p)},
                  length(p));
    }
  }

 private:
  bool zigzag_ = false;
  std::vector<idx_t> lengths_, begins_;
  idx_t tokens_ = 0;
};

}}}  // namespace attn::ATTN_ISA::detail
