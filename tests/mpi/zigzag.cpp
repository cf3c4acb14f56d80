// Tokens in zigzag order: which a process has, and their way from process 0 and back.
#include "parts.hpp"

namespace testing::zigzag_tests {

TEST_CASE("zigzag: every token is on one process, one early and one late range on each", "[zigzag]") {
  CHECK(attn::mpi::zigzag_positions(8, 0, 2) == std::vector<idx_t>{0, 1, 6, 7});
  CHECK(attn::mpi::zigzag_positions(8, 1, 2) == std::vector<idx_t>{2, 3, 4, 5});
  for (int size : {1, 2, 3, 7})
    for (idx_t tokens : {0, 1, 5, 41, 256}) {
      std::vector<idx_t> all, halves(static_cast<std::size_t>(tokens));
      for (int rank = 0; rank < size; ++rank) {
        const std::vector<idx_t> own = attn::mpi::zigzag_positions(tokens, rank, size);
        CHECK(attn::mpi::zigzag_length(tokens, rank, size) == std::ssize(own));
        CHECK(std::is_sorted(own.begin(), own.end()));
        CHECK(std::abs(std::ssize(own) - tokens / size) <= 2);
        all.insert(all.end(), own.begin(), own.end());
      }
      std::sort(all.begin(), all.end());
      std::iota(halves.begin(), halves.end(), idx_t(0));
      CHECK(all == halves);
    }
  CHECK(well_formed(refusal([] { attn::mpi::zigzag_length(-1, 0, 2); }), "mpi::zigzag_length"));
  CHECK(well_formed(refusal([] { attn::mpi::zigzag_positions(9, 2, 2); }), "mpi::zigzag_length"));
  CHECK(well_formed(refusal([] { attn::mpi::zigzag_length(9, -1, 2); }), "mpi::zigzag_length"));
}

TEST_CASE("zigzag: scattered and gathered", "[zigzag]") {
  for (idx_t tokens : {0, 3, 50}) {
    const tensor<float> all = cast<float>(random_normal(4, 2, 3, tokens, 5));
    const std::vector<idx_t> own = own_rows(tokens, spread::zigzag);
    tensor<float> part(2, 3, std::ssize(own), 5, 7), back(2, 3, tokens, 5, 7);
    attn::mpi::zigzag_scatter(own_rank() == 0 ? view(all) : attn::tensor_view<const float>(), view(part),
                              MPI_COMM_WORLD);
    CHECK(part == rows(all, own));
    attn::mpi::zigzag_gather(view(std::as_const(part)), own_rank() == 0 ? view(back) : attn::tensor_view<float>(),
                             MPI_COMM_WORLD);
    CHECK(back == (own_rank() == 0 ? all : tensor<float>(2, 3, tokens, 5, 7)));
  }
}

TEST_CASE("zigzag: all processes refuse what does not fit one", "[zigzag]") {
  const idx_t tokens = 20;
  const auto own = std::ssize(own_rows(tokens, spread::zigzag));
  const bool last = own_rank() + 1 == process_count();
  tensor<float> all(1, 2, tokens, 3), part(1, 2, own, 3, 7), longer(1, 2, own + 1, 3, 7), wider(1, 2, own, 4, 7);
  const auto check = [&](const char* says, auto& wrong) {
    auto& given = last ? wrong : part;
    check_all_refuse("mpi::zigzag_scatter", says,
                     [&] { attn::mpi::zigzag_scatter(view(all), view(given), MPI_COMM_WORLD); });
    check_all_refuse("mpi::zigzag_gather", says,
                     [&] { attn::mpi::zigzag_gather(view(std::as_const(given)), view(all), MPI_COMM_WORLD); });
    CHECK(std::all_of(given.data.begin(), given.data.end(), [](float x) { return x == 7; }));
  };
  check("in zigzag order", longer);
  check("dim", wider);
  check_all_refuse("mpi::zigzag_scatter", "MPI_COMM_NULL",
                   [&] { attn::mpi::zigzag_scatter(view(all), view(part), MPI_COMM_NULL); });
}

}  // namespace testing::zigzag_tests
