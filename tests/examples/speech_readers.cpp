// What example 27 reads: a sound, and the package of its model.
#include "readers.hpp"
#include "speech_to_text/package.hpp"
#include "speech_to_text/wav.hpp"

namespace testing {
namespace {

std::string little_endian(unsigned value, int bytes) {
  std::string result;
  for (; bytes > 0; --bytes, value >>= 8) result += static_cast<char>(value & 255);
  return result;
}
std::string chunk(const std::string& name, const std::string& bytes) {
  return name + little_endian(static_cast<unsigned>(bytes.size()), 4) + bytes + std::string(bytes.size() % 2, '\0');
}
std::string wav_format(unsigned channels, unsigned rate, unsigned bits, unsigned format = 1) {
  const unsigned block = channels * bits / 8;
  return chunk("fmt ", little_endian(format, 2) + little_endian(channels, 2) + little_endian(rate, 4) +
                           little_endian(rate * block, 4) + little_endian(block, 2) + little_endian(bits, 2));
}
std::string wav(const std::string& chunks) { return chunk("RIFF", "WAVE" + chunks); }

}  // namespace

TEST_CASE("WAV: chunks before the samples, and what is refused", "[wav]") {
  const temporary_folder folder;
  const auto read = [&](const std::string& bytes) { return speech::read_wav(folder.write("x.wav", bytes), 3); };
  const auto message = [&](const std::string& bytes) { return message_of([&] { read(bytes); }); };
  const std::string samples = little_endian(16384, 2) + little_endian(65536 - 32768, 2) + little_endian(1, 2),
                    format = wav_format(1, 16000, 16), list = chunk("LIST", "abc"), data = chunk("data", samples);
  const numbers expected = {0.5f, -1, 1.0f / 32768};
  CHECK(read(wav(format + data)) == expected);
  CHECK(read(wav(list + format + list + data + list)) == expected);
  CHECK(has(message(wav(wav_format(2, 44100, 24) + data)),
            "x.wav: expected integers of 16 bits, 1 channel, 16000 Hz; found integers of 24 bits, 2 channels, 44100 Hz"
            ": ffmpeg -i "));
  CHECK(has(message(wav(wav_format(1, 16000, 32, 3) + data)), "found other numbers of 32 bits"));
  CHECK(has(message(wav(format + data).substr(0, 48)), "x.wav: expected 6 bytes of samples; the file ends after 4"));
  CHECK(has(message(wav(format + chunk("data", ""))), "x.wav: expected 3 samples or more; found 0"));
  CHECK(has(message(wav(format + list)), "x.wav: expected samples in a WAV file; found none"));
  CHECK(has(message(wav(data)), "x.wav: expected a WAV file with a format"));
  CHECK(has(message("text"), "x.wav: expected a WAV file"));
  CHECK(has(message(""), "x.wav: expected a WAV file"));
  CHECK(has(message_of([] { speech::read_wav("missing.wav", 3); }), "missing.wav: file not found"));
  const std::string good = wav(format + data);
  for (std::size_t n = 0; n < good.size(); ++n) CHECK(message(good.substr(0, n)) != "nothing thrown");
}

TEST_CASE("the package of speech to text", "[package]") {
  const temporary_folder folder;
  const auto open = [&] { return speech::package(folder.path.string(), "tiny"); };
  CHECK(has(message_of([&] { open(); }),
            "expected the unpacked package with dist/model/tiny/quantized/encoder_model.onnx, as made by npm pack "
            "@moonshine-ai/moonshine-js@0.1.29"));
  for (const char* name : {"encoder_model.onnx", "decoder_model_merged.onnx"})
    folder.write("dist/model/tiny/quantized/" + std::string(name), field(7, field(1, field(4, "X"))));
  CHECK(has(message_of([&] { open(); }), "expected the unpacked package with dist/moonshine.min.js"));
  std::string digits = "YQpiYg";  // a, bb
  while (digits.size() < 200004) digits += "AAAA";
  folder.write("dist/moonshine.min.js", "let x=\"" + digits + "==\";");
  const speech::package files = open();
  CHECK(files.pieces.size() == 2);
  CHECK(files.pieces[0] == "a");
  CHECK(files.pieces[1].starts_with("bb"));
  CHECK(has(message_of([&] { files.check(); }), "expected files with SHA-256 e258033a"));
}

}  // namespace testing
