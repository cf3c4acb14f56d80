// attn: tokens in zigzag order, in which causal work is the same on all processes.
//
//   Of 2 P equal parts of a sequence, process p of P holds part p and, after it, part 2 P - 1 - p.
//
//   attn::mpi::zigzag_scatter(whole, part, MPI_COMM_WORLD);       // from process 0: q, k, v, d_out
//   attn::mpi::full_softmax(q, k, v, out, MPI_COMM_WORLD, {.causal = true, .zigzag = true});
//   attn::mpi::zigzag_gather(out, whole, MPI_COMM_WORLD);         // to process 0: out, gradients
//
// A sequence too long for one process is made in this order: zigzag_positions() says which tokens.
//
// Shapes   whole [B, H, L, D], on process 0 alone: the others pass {} or anything; part [B, H, zigzag_length(), D].
// Cost     Process 0 sends or receives the parts of the others once. Memory: there, a part at a time.
// Throws   std::invalid_argument, on every process alike, where shapes do not fit, before anything is sent or written.
#pragma once

#include <attn/core/detail/call_views.hpp>
#include <attn/mpi/detail/ring.hpp>

namespace attn { inline namespace ATTN_ISA { namespace mpi {

/// Tokens of a sequence of `tokens` that process `rank` of `size` holds: their number, and their positions in its
/// order. Throw std::invalid_argument for a process that does not exist, or fewer than 0 tokens.
inline idx_t zigzag_length(idx_t tokens, int rank, int size) {
  const attn::detail::validator check{"mpi::zigzag_length"};
  check.at_least("tokens", 0, tokens);
  if (rank < 0 || rank >= size) check.fail({"a process from 0 to ", size - 1}, rank);
  return attn::detail::sequence_split::zigzag_length(tokens, rank, size);
}
inline std::vector<idx_t> zigzag_positions(idx_t tokens, int rank, int size) {
  std::vector<idx_t> positions;
  positions.reserve(static_cast<std::size_t>(zigzag_length(tokens, rank, size)));
  for (const attn::detail::sequence_range& part : attn::detail::sequence_split::of_zigzag(tokens, rank, size))
    for (idx_t n = 0; n < part.length; ++n) positions.push_back(part.begin + n);
  return positions;
}

}}}  // namespace attn::ATTN_ISA::mpi

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The whole on process 0, and a part on each. W or P is const: that one is read.
template <class W, class P>
class zigzag_exchange {
 public:
  using S = std::remove_const_t<W>;

  zigzag_exchange(const char* name, MPI_Comm communicator, const tensor_view<W>& whole, const tensor_view<P>& part)
      : group_(name, communicator), whole_(whole), part_(part) {
    const bool root = group_.rank() == 0;
    const auto all = agree(group_,
                           {.batch = part.extent(0), .heads = part.extent(1), .dim = part.extent(3),
                            .element_bytes = element_code<S>, .queries = root ? whole.extent(2) : 0,
                            .keys = part.extent(2)},
                           [&] { validate(validator(name), root); });
    tokens_ = all[0].queries;
    std::vector<idx_t> lengths;
    for (const process_shape& one : all) lengths.push_back(one.keys);
    for (int p = 0; p < group_.size(); ++p)
      validator(name).equal(
          error_text{"tokens in the part of process ", p, ", of ", tokens_, " in zigzag order:"}.c_str(),
          sequence_split::zigzag_length(tokens_, p, group_.size()), lengths[static_cast<std::size_t>(p)]);
  }

  /// Through memory on both sides.
  void run() const {
    const bool root = group_.rank() == 0;
    const idx_t row = part_.extent(0) * part_.extent(1) * part_.extent(3);
    std::vector<S> memory;
    const auto on_part = [&] {
      std::size_t at = 0;
      for_each_row(part_, [&](idx_t b, idx_t h, idx_t i) {
        for (idx_t d = 0; d < part_.extent(3); ++d) move(memory[at++], part_(b, h, i, d));
      });
    };
    const auto on_whole = [&](const std::vector<idx_t>& positions) {
      std::size_t at = 0;
      for (idx_t b = 0; root && b < part_.extent(0); ++b)
        for (idx_t h = 0; h < part_.extent(1); ++h)
          for (idx_t i : positions)
            for (idx_t d = 0; d < part_.extent(3); ++d) move(memory[at++], whole_(b, h, i, d));
    };
    message_list messages;
    // Process 0 exchanges one part after the other, its own among them; the others theirs.
    for (int p = group_.rank(); p < (root ? group_.size() : group_.rank() + 1); ++p) {
      const std::vector<idx_t> positions = mpi::zigzag_positions(tokens_, p, group_.size());
      const bool own = p == group_.rank();
      memory.resize(positions.size() * static_cast<std::size_t>(row));
      if (from_whole)
        on_whole(positions);
      else if (own)
        on_part();
      if (!root || !own) {
        const std::size_t bytes = memory.size() * sizeof(S);
        const int other = root ? p : 0;
        if (root == from_whole)
          messages.send(memory.data(), bytes, other, 0, group_.get());
        else
          messages.receive(memory.data(), bytes, other, 0, group_.get());
        messages.wait();
      }
      if (!from_whole)
        on_whole(positions);
      else if (own)
        on_part();
    }
  }

 private:
  static constexpr bool from_whole = std::is_const_v<W>;

  template <class X>
  static void move(S& memory, X& element) {
    if constexpr (std::is_const_v<X>)
      memory = element;
    else
      element = memory;
  }

  void validate(const validator& check, bool root) const {
    call_views views(check);
    if (from_whole && root) views.read("whole", whole_);
    from_whole ? views.write("part", part_) : views.read("part", part_);
    if (!from_whole && root) views.write("whole", whole_);
    if (!root) return;
    check.extents({{"part batch = whole batch", whole_.extent(0), part_.extent(0)},
                   {"part heads = whole heads", whole_.extent(1), part_.extent(1)},
                   {"part dim = whole dim", whole_.extent(3), part_.extent(3)}});
  }

  process_communicator group_;
  tensor_view<W> whole_;
  tensor_view<P> part_;
  idx_t tokens_ = 0;
};

}}}  // namespace attn::ATTN_ISA::detail

namespace attn { inline namespace ATTN_ISA { namespace mpi {

/// Rows of `whole` on process 0 to the parts of all processes. See the top of the file.
template <viewable P>
void zigzag_scatter(std::type_identity_t<tensor_view<const element_of<P>>> whole, P&& part, MPI_Comm communicator) {
  using S = element_of<P>;
  attn::detail::zigzag_exchange<const S, S>("mpi::zigzag_scatter", communicator, whole, as_view(part)).run();
}

/// The parts of all processes to the rows of `whole` on process 0. See the top of the file.
template <viewable P>
void zigzag_gather(const P& part, std::type_identity_t<tensor_view<element_of<const P&>>> whole,
                   MPI_Comm communicator) {
  using S = element_of<const P&>;
  attn::detail::zigzag_exchange<S, const S>("mpi::zigzag_gather", communicator, whole, as_view(part)).run();
}

}}}  // namespace attn::ATTN_ISA::mpi
