// What pixels of an image see: attention of each to the pixels around it whose surroundings look like its own, nothing
// learned. In this form it is a filter, which removes noise and keeps edges (non-local means, Buades et al. 2005).
// Usage: 21_neighborhood [image.pgm or .ppm] [seen.pgm]; without an image it makes a noisy picture.
#include <attn/core/threads.hpp>
#include <attn/softmax/neighborhood_backward.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

using attn::idx_t;

struct picture {
  idx_t rows = 0, columns = 0;
  std::vector<float> light, clean;  // 0 to 1, row by row; without noise, where that is known

  float at(idx_t r, idx_t c) const {
    return light[std::size_t(std::clamp<idx_t>(r, 0, rows - 1) * columns + std::clamp<idx_t>(c, 0, columns - 1))];
  }
};

picture make_picture() {  // rings and bricks in noise
  picture p{192, 256, {}, {}};
  for (idx_t r = 0, noise = 1; r < p.rows; ++r)
    for (idx_t c = 0; c < p.columns; ++c) {
      const float ring = std::hypot(float(r) - 96, float(c) - 90), brick = float(c > 170 && (r / 8 + c / 16) % 2);
      float sum = 0;  // of four numbers from -1/2 to 1/2
      for (int n = 0; n < 4; ++n) noise = noise * 69069 % 65537 + 1, sum += float(noise) / 65537 - 0.5f;
      p.clean.push_back(0.3f + 0.4f * float(std::fmod(ring, 24) < 8 && ring < 84) + 0.3f * brick);
      p.light.push_back(p.clean.back() + 0.14f * sum);
    }
  return p;
}

picture read_picture(const std::string& path) {  // binary PGM, or PPM as grey, of 8 bits
  std::ifstream file(path, std::ios::binary);
  std::string kind;
  picture p;
  int most = 0;
  file >> kind >> std::ws;
  while (file.peek() == '#') file.ignore(1 << 20, '\n');
  file >> p.columns >> p.rows >> most;
  file.get();
  if (!file || (kind != "P5" && kind != "P6") || most != 255 || p.rows < 16 || p.columns < 16) return {};
  const idx_t colours = kind == "P6" ? 3 : 1;
  std::string bytes(std::size_t(p.rows * p.columns * colours), '\0');
  if (!file.read(bytes.data(), std::streamsize(bytes.size()))) return {};
  for (std::size_t n = 0; n < bytes.size(); n += std::size_t(colours)) {
    float sum = 0;
    for (idx_t c = 0; c < colours; ++c) sum += float(static_cast<unsigned char>(bytes[n + std::size_t(c)]));
    p.light.push_back(sum / float(255 * colours));
  }
  return p;
}

int main(int argc, char** argv) {
  if (argc > 1 && !std::ifstream(argv[1])) return std::fprintf(stderr, "file not found: %s\n", argv[1]), 1;
  picture p = argc > 1 ? read_picture(argv[1]) : make_picture();
  if (p.light.empty())
    return std::fprintf(stderr, "%s: expected a binary PGM or PPM of 8 bits, at least 16 x 16\n", argv[1]), 1;
  const idx_t pixels = p.rows * p.columns;

  // The score of two pixels is -|a - b|^2 / (2 s^2) of the 5 x 5 pixels around them. Its part of the query alone does
  // not change the softmax; that of the key is a product with a dim of 1.
  constexpr idx_t reach = 2, dim = (2 * reach + 1) * (2 * reach + 1) + 1;
  constexpr float precision = 12;  // 1 / s^2
  std::vector<float> query, key;
  for (idx_t r = 0; r < p.rows; ++r)
    for (idx_t c = 0; c < p.columns; ++c) {
      float square = 0;
      for (idx_t y = r - reach; y <= r + reach; ++y)
        for (idx_t x = c - reach; x <= c + reach; ++x) {
          const float light = p.at(y, x);
          square += light * light;
          query.push_back(precision * light), key.push_back(light);
        }
      query.push_back(precision), key.push_back(-square / 2);
    }
  const attn::tensor_view<const float> q(query.data(), {1, 1, pixels, dim}), k(key.data(), {1, 1, pixels, dim}),
      v(p.light.data(), {1, 1, pixels, 1});
  attn::execution threads(2);

  struct panel {
    const char* name;
    attn::neighborhood_options<float> options;
    std::vector<float> filtered{}, seen{};
  };
  const attn::per_axis grid = {p.rows, p.columns};
  // Swin's windows divide the axes; else the last ones overlap those before.
  panel panels[] = {{"13 x 13 pixels around each", {.grid = grid, .kernel = {13, 13}, .scale = 1.0f}},
                    {"windows of 16 x 16", {.grid = grid, .kernel = {16, 16}, .stride = {16, 16}, .scale = 1.0f}},
                    {"windows shifted by 8",
                     {.grid = grid, .kernel = {16, 16}, .stride = {16, 16}, .shift = {8, 8}, .scale = 1.0f}}};
  for (panel& one : panels) {
    one.filtered.resize(std::size_t(pixels)), one.seen.resize(std::size_t(pixels));
    const attn::tensor_view<float> out(one.filtered.data(), {1, 1, pixels, 1}), seen(one.seen.data(), out.extents());
    attn::neighborhood(q, k, v, out, one.options, threads);
    // The gradient of v is the sum of the rows of weights times d_out: with 1 for some pixels, far enough from one
    // another, the weights that each of them gives to others.
    std::vector<float> chosen(std::size_t(pixels), 0.0f);
    for (idx_t r = 12; r < p.rows; r += 24)
      for (idx_t c = 12; c < p.columns; c += 24) chosen[std::size_t(r * p.columns + c)] = 1;
    const attn::tensor_view<const float> d_out(chosen.data(), out.extents());
    attn::neighborhood_backward(q, k, v, out, d_out, {.v = seen}, one.options, threads);
  }

  const auto error = [&](const std::vector<float>& x) {
    double sum = 0;
    for (std::size_t n = 0; n < x.size(); ++n) sum += double(x[n] - p.clean[n]) * double(x[n] - p.clean[n]);
    return std::sqrt(sum / double(pixels));
  };
  if (!p.clean.empty()) {
    std::printf("root mean square of the noise: %.4f", error(p.light));
    for (const panel& one : panels) std::printf(", %.4f after %s", error(one.filtered), one.name);
    std::puts("");
  }

  // Above, the image and what the attention of each panel makes of it; below, what some pixels see.
  const std::string path = argc > 2 ? argv[2] : "seen.pgm";
  std::printf("%s: the image, then with %s, %s, %s; what some pixels see is below\n", path.c_str(), panels[0].name,
              panels[1].name, panels[2].name);
  std::ofstream file(path, std::ios::binary);
  file << "P5\n" << 4 * p.columns << ' ' << 2 * p.rows << "\n255\n";
  for (idx_t r = 0; r < 2 * p.rows; ++r) {
    const bool below = r >= p.rows, shown = below && r - p.rows < 48 && r % 2 == 0;
    for (idx_t n = 0; n < 4 * p.columns; ++n) {
      const idx_t at = r % p.rows * p.columns + n % p.columns;
      const panel* const one = n < p.columns ? nullptr : &panels[n / p.columns - 1];
      float light = one ? (below ? one->seen : one->filtered)[std::size_t(at)] : p.light[std::size_t(at)];
      if (one && below) light = std::sqrt(light * 8);  // weights are small
      light = std::clamp(light, 0.0f, 1.0f);
      file.put(char(std::lround(255 * light)));
      if (shown && n % p.columns >= 48 && n % p.columns < 80) std::putchar(" .:-=+*#%@"[int(9.99f * light)]);
    }
    if (shown) std::puts("");
  }
  if (!file.flush()) return std::fprintf(stderr, "cannot write %s\n", path.c_str()), 1;
}
