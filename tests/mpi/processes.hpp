#pragma once
// What all tests over processes share: who runs them, views of their tensors, what all processes refuse.
#include <attn/core/mask_view.hpp>
#include <attn/core/tensor_view.hpp>

#include <mpi.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/measure.hpp"
#include "support/random.hpp"
#include "support/refusal.hpp"
#include "support/tensor.hpp"

namespace testing {

inline int own_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}
inline int process_count() {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

template <class T>
attn::tensor_view<const T> view(const tensor<T>& x) {
  return {x.data.data(), x.extents};
}
template <class T>
attn::tensor_view<T> view(tensor<T>& x) {
  return {x.data.data(), x.extents};
}
// [batch, head, length, 1] as [batch, head, length].
template <class T>
attn::tensor_view<const T, 3> row_view(const tensor<T>& x) {
  return {x.data.data(), {x.batch(), x.heads(), x.length()}};
}
template <class T>
attn::tensor_view<T, 3> row_view(tensor<T>& x) {
  return {x.data.data(), {x.batch(), x.heads(), x.length()}};
}

// A mask of keys that hides none.
inline attn::key_mask_view seeing_mask(idx_t keys) {
  static const std::vector<std::uint8_t> seen(64, 1);
  return attn::tensor_view<const std::uint8_t, 2>(seen.data(), {1, keys});
}

// The message with which `call` was refused, which must be the same on all processes and of the usual form.
template <class Call>
std::string refusal_of_all(const std::string& name, const Call& call) {
  const std::string message = refusal(call);
  std::vector<char> text(512), first(512);
  std::copy_n(message.c_str(), std::min<std::size_t>(message.size() + 1, 511), text.begin());
  first = text;
  MPI_Bcast(first.data(), 512, MPI_CHAR, 0, MPI_COMM_WORLD);
  CAPTURE(message);
  CHECK(text == first);
  CHECK(well_formed(message, name));
  return message;
}
inline bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace testing
