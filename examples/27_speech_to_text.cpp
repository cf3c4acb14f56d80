// Speech to text with trained weights: Moonshine, an encoder of the sound and a decoder with cross attention to it.
//
//   27_speech_to_text PACKAGE WAV... [--size=tiny] [--weights=half] [--cache=float] [--threads=1] [--compare]
//
// PACKAGE is the folder of the model, 21.5 MB under the licence MIT, which this command makes; a WAV file has integers
// of 16 bits, one channel, 16000 Hz:
//
//   npm pack @moonshine-ai/moonshine-js@0.1.29 && tar xf moonshine-ai-moonshine-js-0.1.29.tgz
//   27_speech_to_text package speech.wav
//
// Words are printed as they come, then the times. A sound of more than some 30 s should be cut at pauses: beyond that
// the decoder repeats itself. Without arguments the weights are random, and so is the sound; all tokens at once then
// have to give the logits that they gave one by one.
//
//   --size=base        the larger model, of npm's @usefulsensors/moonshine-js@0.1.16
//   --weights=float, half (16 bits) or int8, --cache=float or int8: how the weights, keys and values are kept
//   --compare          which tokens change by --weights= and --cache=; tokens and times of ONNX Runtime, where node has
//                      onnxruntime-node (npm install onnxruntime-node)
//
// speech_to_text/ has the model, its weights by name, the package and the reader of WAV files; support/ reads ONNX.
//
//   g++ -std=c++20 -O3 -march=native -DNDEBUG -I attn/include -I /usr/include/eigen3 27_speech_to_text.cpp
#include <attn/core/threads.hpp>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "speech_to_text/model.hpp"
#include "speech_to_text/onnx_runtime.hpp"
#include "speech_to_text/package.hpp"
#include "speech_to_text/wav.hpp"

namespace speech {

constexpr int sample_rate = 16000;

struct arguments {
  std::string package, size = "tiny";
  std::vector<std::string> sounds;
  storage stored;
  int threads = 1;
  bool compare = false;
};

arguments read_arguments(const std::vector<std::string>& list) {
  arguments result;
  std::vector<std::string> others;
  const auto one_of = [](const std::string& name, const std::string& value, const std::vector<std::string>& values) {
    std::string names;
    for (const std::string& x : values) names += (names.empty() ? "" : ", ") + x;
    if (std::find(values.begin(), values.end(), value) == values.end())
      throw std::runtime_error(name + ": expected one of " + names + "; found " + value);
    return value;
  };
  for (const std::string& x : list) {
    if (x.starts_with("--size=")) {
      result.size = one_of("--size=", x.substr(7), {"tiny", "base"});
    } else if (x.starts_with("--weights=")) {
      result.stored.weights = one_of("--weights=", x.substr(10), {"float", "half", "int8"});
    } else if (x.starts_with("--cache=")) {
      result.stored.cache = one_of("--cache=", x.substr(8), {"float", "int8"});
    } else if (x.starts_with("--threads=")) {
      const auto [end, error] = std::from_chars(x.data() + 10, x.data() + x.size(), result.threads);
      if (error != std::errc() || end != x.data() + x.size() || result.threads < 1 || result.threads > 1024)
        throw std::runtime_error("--threads=: expected a number from 1 to 1024; found " + x.substr(10));
    } else if (x == "--compare") {
      result.compare = true;
    } else if (x.starts_with("-")) {
      throw std::runtime_error("usage: 27_speech_to_text PACKAGE WAV... [--size=tiny|base] "
                               "[--weights=float|half|int8] [--cache=float|int8] [--threads=N] [--compare]");
    } else {
      others.push_back(x);
    }
  }
  if (others.size() == 1) throw std::runtime_error("expected a WAV file after the package; found none");
  if (!others.empty()) result.package = others[0], result.sounds.assign(others.begin() + 1, others.end());
  return result;
}

/// How many tokens a sound may have: more are those of a decoder that repeats itself.
idx_t most_tokens(idx_t samples) { return 8 + 8 * samples / sample_rate; }

/// Pieces as text: <0x41> is a byte, U+2581 a space, of which the first one is left out.
std::string text_of(const std::vector<std::string>& pieces, idx_t token, bool first) {
  const std::string_view piece = token < std::ssize(pieces) ? pieces[std::size_t(token)] : std::string_view();
  if (piece.size() == 6 && piece.starts_with("<0x"))
    return std::string(1, static_cast<char>(std::strtol(piece.data() + 3, nullptr, 16)));
  std::string text;
  for (std::size_t n = 0; n < piece.size(); ++n)
    if (piece.substr(n).starts_with("\u2581")) text += n == 0 && first ? "" : " ", n += 2;
    else text += piece[n];
  return text;
}

/// Calls take(token) for every token as it comes.
template <class Take>
transcript transcribe(const model& m, const std::vector<float>& samples, attn::execution& exec, Take&& take) {
  transcript result;
  auto lap = [last = std::chrono::steady_clock::now()]() mutable {
    const auto before = std::exchange(last, std::chrono::steady_clock::now());
    return std::chrono::duration<double>(last - before).count();
  };
  matrix x = m.front_end(samples, exec);
  result.front_end = lap();
  x = m.encode(std::move(x), exec);
  result.encoder = lap();
  model::state state = m.start(x, exec);
  for (idx_t token = first_token; std::ssize(result.tokens) < most_tokens(std::ssize(samples));) {
    m.feed({&token, 1}, state, exec).row(0).maxCoeff(&token);
    if (token == last_token) break;
    take(token);
    result.tokens.push_back(token);
  }
  result.decoder = lap();
  return result;
}
transcript best_of_three(const model& m, const std::vector<float>& samples, attn::execution& exec) {
  transcript best = transcribe(m, samples, exec, [](idx_t) {});
  for (int n = 0; n < 2; ++n) {
    const transcript again = transcribe(m, samples, exec, [](idx_t) {});
    best.front_end = std::min(best.front_end, again.front_end), best.encoder = std::min(best.encoder, again.encoder);
    best.decoder = std::min(best.decoder, again.decoder);
  }
  return best;
}

/// The fewest insertions, removals and replacements that make one list of another.
idx_t changes(const std::vector<idx_t>& from, const std::vector<idx_t>& to) {
  std::vector<idx_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (const idx_t x : from) {
    idx_t diagonal = row[0]++;
    for (std::size_t n = 0; n < to.size(); ++n)
      diagonal = std::exchange(row[n + 1], std::min({row[n] + 1, row[n + 1] + 1, diagonal + (x != to[n])}));
  }
  return row.back();
}

void print_times(const transcript& t, double seconds) {
  const double all = t.front_end + t.encoder + t.decoder;
  std::printf("%.1f s of speech: front end %.0f ms, encoder %.0f ms, %zu tokens at %.0f a second; ", seconds,
              1e3 * t.front_end, 1e3 * t.encoder, t.tokens.size(), double(t.tokens.size() + 1) / t.decoder);
  std::printf("%.0f times real time\n", seconds / all);
}

void compare(const package& files, const model& m, const std::vector<std::vector<float>>& sounds,
             const arguments& given, attn::execution& exec) {
  std::vector<transcript> own;
  for (const auto& samples : sounds) own.push_back(best_of_three(m, samples, exec));
  const auto milliseconds = [](const std::vector<transcript>& list) {  // of the encoder, and a token
    double encoder = 0, decoder = 0, tokens = 0;
    for (const transcript& t : list)
      encoder += t.front_end + t.encoder, decoder += t.decoder, tokens += double(t.tokens.size() + 1);
    return std::pair(1e3 * encoder, 1e3 * decoder / tokens);
  };
  const auto print = [&](const char* name, const std::vector<transcript>& others) {
    idx_t changed = 0, tokens = 0;
    for (std::size_t n = 0; n < own.size(); ++n)
      changed += changes(others[n].tokens, own[n].tokens), tokens += std::ssize(others[n].tokens);
    const auto here = milliseconds(own), there = milliseconds(others);
    std::printf("%s: %td of %td tokens differ; encoder %.0f ms, here %.0f; %.2f ms a token, here %.2f\n", name, changed,
                tokens, there.first, here.first, there.second, here.second);
  };
  if (given.stored.weights != "float" || given.stored.cache != "float") {
    const model exact(weights::of_encoder(files.encoder), weights::of_decoder(files.decoder), {"float", "float"});
    std::vector<transcript> others;
    for (const auto& samples : sounds) others.push_back(best_of_three(exact, samples, exec));
    print("float", others);
  }
  const auto others = by_onnx_runtime(files.encoder.path(), files.decoder.path(), sounds, most_tokens);
  if (others.size() == sounds.size()) print("ONNX Runtime", others);
  else std::puts("ONNX Runtime: not found; npm install onnxruntime-node");
}

/// Random weights: tokens one by one, and all of them at once.
int self_test(const arguments& given) {
  attn::execution exec(given.threads);
  const model m(weights(1), weights(2), given.stored);
  attn::random_numbers random(3);
  std::vector<float> samples(sample_rate / 2);
  for (float& x : samples) x = float(random.below(2001)) / 1000 - 1;
  std::printf("No package is given: weights and sound are random. This gets the model:\n  %s\n", fetch_command);
  print_times(transcribe(m, samples, exec, [](idx_t) {}), double(samples.size()) / sample_rate);
  const matrix encoded = m.encode(m.front_end(samples, exec), exec);
  const std::vector<idx_t> tokens = {first_token, 450, 4996, 17354, 1701, 29916};
  model::state one_by_one = m.start(encoded, exec), at_once = m.start(encoded, exec);
  const matrix all = m.feed(tokens, at_once, exec);
  float most = 0;
  for (idx_t t = 0; t < all.rows(); ++t)
    most = std::max(most, (m.feed({&tokens[std::size_t(t)], 1}, one_by_one, exec) - all.row(t)).cwiseAbs().maxCoeff());
  std::printf("logits one by one and at once differ by %.1e at most, the largest is %.1f\n", most,
              all.cwiseAbs().maxCoeff());
  return most <= 1e-4f * all.cwiseAbs().maxCoeff() ? 0 : 1;
}

int run(const arguments& given) {
  if (given.package.empty()) return self_test(given);
  const package files(given.package, given.size);
  const weights encoder = weights::of_encoder(files.encoder), decoder = weights::of_decoder(files.decoder);
  std::vector<std::vector<float>> sounds;
  for (const std::string& path : given.sounds) sounds.push_back(read_wav(path, least_samples));
  const model m(encoder, decoder, given.stored);
  files.check();
  attn::execution exec(given.threads);
  for (std::size_t n = 0; n < sounds.size(); ++n) {
    bool first = true;
    const transcript t = transcribe(m, sounds[n], exec, [&](idx_t token) {
      std::fputs(text_of(files.pieces, token, std::exchange(first, false)).c_str(), stdout);
      std::fflush(stdout);
    });
    std::puts("");
    print_times(t, double(sounds[n].size()) / sample_rate);
  }
  if (given.compare) compare(files, m, sounds, given, exec);
  return 0;
}

}  // namespace speech

int main(int argc, char** argv) try {
  return speech::run(speech::read_arguments({argv + 1, argv + argc}));
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
