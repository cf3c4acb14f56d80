// attn: which tokens of a sequence each process holds.
#pragma once

#include <attn/mpi/detail/process_group.hpp>

namespace attn::inline ATTN_ISA::detail {

/// Tokens [begin, begin + length) of the whole sequence, which are `local` and the next ones of their process.
struct sequence_range {
  index begin = 0, length = 0, local = 0;
};

/// Token at which part `part` of `parts` equal ones begins.
inline index part_begin(index tokens, index part, index parts) {
  return tokens / parts * part + tokens % parts * part / parts;
}

/// The ranges of every process: one after another; or, in zigzag order, of 2 P equal parts of the sequence the parts p
/// and 2 P - 1 - p for process p, so that causal work is the same for all.
class sequence_split {
 public:
  sequence_split() = default;
  sequence_split(std::span<const index> lengths, bool zigzag)
      : zigzag_(zigzag), lengths_(lengths.begin(), lengths.end()) {
    index at = 0;
    for (index n : lengths_) begins_.push_back(at), at += n;
    tokens_ = at;
  }

  index tokens() const { return tokens_; }
  index length(int process) const { return lengths_[static_cast<std::size_t>(process)]; }
  /// Of the process that has most.
  index most() const { return lengths_.empty() ? 0 : *std::max_element(lengths_.begin(), lengths_.end()); }
  int processes() const { return static_cast<int>(lengths_.size()); }

  /// How many tokens this process must hold.
  static index zigzag_length(index tokens, int process, int processes) {
    const auto parts = of_zigzag(tokens, process, processes);
    return parts[0].length + parts[1].length;
  }
  static std::array<sequence_range, 2> of_zigzag(index tokens, int process, int processes) {
    const index parts = 2 * processes, late = parts - 1 - process;
    sequence_range a{part_begin(tokens, process, parts), 0, 0}, b{part_begin(tokens, late, parts), 0, 0};
    a.length = part_begin(tokens, process + 1, parts) - a.begin;
    b.length = part_begin(tokens, late + 1, parts) - b.begin, b.local = a.length;
    return {a, b};
  }

  std::array<sequence_range, 2> of(int process) const {
    if (zigzag_) return of_zigzag(tokens_, process, processes());
    return {sequence_range{begins_[static_cast<std::size_t>(process)], length(process), 0}, sequence_range{}};
  }

  void check(const process_group& group, const char* what) const {
    for (int p = 0; zigzag_ && p < processes(); ++p) {
      const index wanted = zigzag_length(tokens_, p, processes());
      if (length(p) != wanted)
        validator(group.name())
            .fail({what, " in zigzag order: ", wanted, " of ", tokens_, " tokens on process ", index(p)},
                  length(p));
    }
  }

 private:
  bool zigzag_ = false;
  std::vector<index> lengths_, begins_;
  index tokens_ = 0;
};

}  // namespace attn::inline ATTN_ISA::detail
