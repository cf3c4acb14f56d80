// Samples of a WAV file: integers of 16 bits, one channel, 16000 Hz. Throws std::runtime_error for every other
// file, and for one of too few samples.
#pragma once

#include "../support/arrays.hpp"

namespace speech {

inline std::vector<float> read_wav(const std::string& path, std::ptrdiff_t least) {
  using support::fail;
  const std::string file = support::read_file(path);
  const auto number = [&](std::size_t at, std::size_t bytes) {
    std::size_t n = 0;
    while (bytes-- > 0) n = n << 8 | static_cast<unsigned char>(file[at + bytes]);
    return n;
  };
  if (file.size() < 12 || file.compare(0, 4, "RIFF") != 0 || file.compare(8, 4, "WAVE") != 0)
    fail(path, "expected a WAV file");
  bool has_format = false;
  for (std::size_t at = 12, size = 0; at + 8 <= file.size(); at += 8 + size + size % 2) {  // chunks
    size = number(at + 4, 4);
    const std::size_t rest = file.size() - at - 8;
    if (file.compare(at, 4, "fmt ") == 0 && size >= 16 && size <= rest) {
      const std::size_t format = number(at + 8, 2), channels = number(at + 10, 2), rate = number(at + 12, 4),
                        bits = number(at + 22, 2);
      const bool integers = format == 1 || (format == 0xfffe && size >= 26 && number(at + 32, 2) == 1);
      if (!integers || channels != 1 || rate != 16000 || bits != 16)
        fail(path, "expected integers of 16 bits, 1 channel, 16000 Hz; found " +
                       std::string(integers ? "integers" : "other numbers") + " of " + std::to_string(bits) +
                       " bits, " + std::to_string(channels) + (channels == 1 ? " channel, " : " channels, ") +
                       std::to_string(rate) +
                       " Hz: ffmpeg -i " + path + " -ar 16000 -ac 1 -c:a pcm_s16le 16k.wav converts it");
      has_format = true;
    } else if (file.compare(at, 4, "data") == 0 && has_format) {
      if (size > rest)
        fail(path, "expected " + std::to_string(size) + " bytes of samples; the file ends after " +
                       std::to_string(rest));
      std::vector<float> samples(size / 2);
      if (std::ssize(samples) < least)
        fail(path, "expected " + std::to_string(least) + " samples or more; found " + std::to_string(samples.size()));
      for (std::size_t n = 0; n < samples.size(); ++n)
        samples[n] = static_cast<float>(static_cast<std::int16_t>(number(at + 8 + 2 * n, 2))) / 32768;
      return samples;
    }
  }
  fail(path, has_format ? "expected samples in a WAV file; found none" : "expected a WAV file with a format");
}

}  // namespace speech
