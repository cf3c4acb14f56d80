// An image filtered by attention-free mixing: 2-D aft_conv over its pixels, a head for each filter, nothing learned.
// Usage: 08_image_mixing [image.pgm or .ppm] [mixed.pgm]; without an image it makes a picture.
#include <attn/aft/aft_conv.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

struct picture {
  attn::idx_t rows = 0, columns = 0;
  std::vector<float> light;  // 0 to 1, row by row
};

picture make_picture() {  // rings and bricks in noise
  picture p{192, 256, {}};
  for (attn::idx_t r = 0, noise = 1; r < p.rows; ++r)
    for (attn::idx_t c = 0; c < p.columns; ++c) {
      const float ring = std::hypot(float(r) - 96, float(c) - 90), brick = float(c > 170 && (r / 4 + c / 16) % 2);
      noise = noise * 69069 % 65537 + 1;
      p.light.push_back(0.25f + 0.4f * float(std::fmod(ring, 24) < 4 && ring < 84) + 0.35f * brick +
                        float(noise) / 4e5f);
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
  if (!file || (kind != "P5" && kind != "P6") || most != 255 || p.rows < 1 || p.columns < 1) return {};
  const attn::idx_t colours = kind == "P6" ? 3 : 1;
  std::string bytes(std::size_t(p.rows * p.columns * colours), '\0');
  if (!file.read(bytes.data(), std::streamsize(bytes.size()))) return {};
  for (std::size_t n = 0; n < bytes.size(); n += std::size_t(colours)) {
    float sum = 0;
    for (attn::idx_t c = 0; c < colours; ++c) sum += float(static_cast<unsigned char>(bytes[n + std::size_t(c)]));
    p.light.push_back(sum / float(255 * colours));
  }
  return p;
}

int main(int argc, char** argv) {
  const picture p = argc > 1 ? read_picture(argv[1]) : make_picture();
  if (argc > 1 && !std::ifstream(argv[1])) return std::fprintf(stderr, "file not found: %s\n", argv[1]), 1;
  if (p.light.empty()) return std::fprintf(stderr, "%s: expected a binary PGM or PPM of 8 bits\n", argv[1]), 1;
  constexpr attn::idx_t heads = 3, size = 11;
  const attn::idx_t pixels = p.rows * p.columns;

  // In all heads the values are the brightness. Heads differ in the weight of a pixel, its key: equal weights, the
  // lightest pixels most, or the darkest most.
  std::vector<float> key, kernel, mixed(std::size_t(heads * pixels));
  for (float weight : {0.0f, 30.0f, -30.0f})
    for (float x : p.light) key.push_back(weight * x);
  // A Gaussian, plus 60: pixels beyond the kernel are seen too, with a bias of 0, and must count for almost nothing.
  for (attn::idx_t r = -(size / 2); r <= size / 2; ++r)
    for (attn::idx_t c = -(size / 2); c <= size / 2; ++c) kernel.push_back(60 - float(r * r + c * c) / 8);
  const std::array<attn::idx_t, 4> shape = {1, heads, pixels, 1};
  const attn::tensor_view<const float> k(key.data(), shape), v(p.light.data(), shape, {0, 0, 1, 1});  // v: one for all
  const attn::tensor_view<const float> w(kernel.data(), {1, 1, size, size});
  attn::aft_conv(v, k, v, attn::tensor_view<float>(mixed.data(), shape), w,
                 {.grid = attn::token_grid{p.rows, p.columns}, .gate = false});

  const std::string path = argc > 2 ? argv[2] : "mixed.pgm";
  std::printf("%s, %td x %td pixels a picture. From the left: as it was, blurred, lightest nearby, darkest nearby\n",
              path.c_str(), p.columns, p.rows);
  std::ofstream file(path, std::ios::binary);
  file << "P5\n" << 4 * p.columns << ' ' << p.rows << "\n255\n";
  for (attn::idx_t r = 0; r < p.rows; ++r) {
    const bool shown = r % std::max<attn::idx_t>(1, p.rows / 16) == 0;
    for (attn::idx_t n = 0; n < 4 * p.columns; ++n) {
      const float* const image = n < p.columns ? p.light.data() : &mixed[std::size_t((n / p.columns - 1) * pixels)];
      const float light = std::clamp(image[r * p.columns + n % p.columns], 0.0f, 1.0f);
      file.put(char(std::lround(255 * light)));
      if (shown && n % std::max<attn::idx_t>(1, p.columns / 28) == 0) std::putchar(" .:-=+*#%@"[int(9.99f * light)]);
    }
    if (shown) std::puts("");
  }
  if (!file.flush()) return std::fprintf(stderr, "cannot write %s\n", path.c_str()), 1;
}
