// What must fail, hidden from a run of all tests: tests/mpi/CMakeLists.txt runs them one by one.
#include <attn/mpi/full_softmax.hpp>

#include <unistd.h>

#include <stdexcept>
#include <vector>

#include "support/catch.hpp"

namespace {

int own_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

TEST_CASE("an assertion fails on process 1, and the other one waits", "[.][failure_assertion]") {
  INFO("of this process");
  CHECK(own_rank() == 0);
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST_CASE("an exception leaves a test case on process 1, and the other one waits", "[.][failure_exception]") {
  if (own_rank() == 1) throw std::runtime_error("thrown on process 1 alone");
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST_CASE("a score function throws on process 1, amid the ring", "[.][failure_score]") {
  std::vector<float> memory(4 * 8, 1.F), result(4 * 8);
  const attn::tensor_view<const float> x(memory.data(), {1, 1, 4, 8});
  const attn::tensor_view<float> out(result.data(), {1, 1, 4, 8});
  const bool throws = own_rank() == 1;
  attn::mpi::full_softmax(x, x, x, out, MPI_COMM_WORLD, {},
                          [&](float s, attn::idx_t, attn::idx_t, attn::idx_t, attn::idx_t key) {
                            if (throws && key < 4) throw std::runtime_error("thrown by a score function");
                            return s;
                          });
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST_CASE("a process that waits for ever", "[.][failure_time]") {
  alarm(1);  // rather than the usual time
  MPI_Recv(nullptr, 0, MPI_BYTE, 1 - own_rank(), 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

}  // namespace
