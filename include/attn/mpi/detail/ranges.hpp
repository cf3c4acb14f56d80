// attn: which tokens of a sequence each process holds.
#pragma once

#include <attn/mpi/detail/process_group.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

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

  void validate(const process_group& group, const char* what) const {
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
