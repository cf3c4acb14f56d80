// The same model by ONNX Runtime, where node finds it: npm install onnxruntime-node, in the folder one is in.
#pragma once

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "../support/arrays.hpp"

namespace speech {

struct transcript {
  std::vector<std::ptrdiff_t> tokens;  // without those that begin and end it
  double front_end = 0, encoder = 0, decoder = 0;  // seconds
};

/// Of each list of samples, with the best times of three; none where there is no node or no ONNX Runtime.
inline std::vector<transcript> by_onnx_runtime(const std::string& encoder, const std::string& decoder,
                                               const std::vector<std::vector<float>>& sounds,
                                               std::ptrdiff_t (*most_tokens)(std::ptrdiff_t samples)) {
  constexpr const char* script = R"(
const fs = require('fs'), ort = require('onnxruntime-node');
(async () => {
  const [encoderPath, decoderPath, ...jobs] = fs.readFileSync(process.argv[2], 'utf8').trim().split('\n');
  const options = {intraOpNumThreads: 1, interOpNumThreads: 1, executionMode: 'sequential', logSeverityLevel: 3};
  const encoder = await ort.InferenceSession.create(encoderPath, options);
  const decoder = await ort.InferenceSession.create(decoderPath, options);
  const cacheNames = decoder.inputNames.filter(n => n.startsWith('past_key_values'));
  const now = () => Number(process.hrtime.bigint()) / 1e9;
  for (const job of jobs) {
    const [most, path] = job.split(/ (.*)/), bytes = fs.readFileSync(path);
    const samples = new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
    let best = [1e9, 1e9], tokens;
    for (let run = 0; run < 3; ++run) {
      const start = now();
      const encoded = (await encoder.run({input_values: new ort.Tensor('float32', samples, [1, samples.length])}))
          .last_hidden_state;
      const between = now(), dim = encoded.dims[2] / 8, feeds = {encoder_hidden_states: encoded};
      for (const name of cacheNames) feeds[name] = new ort.Tensor('float32', [], [1, 8, 0, dim]);
      tokens = [];
      for (let token = 1; tokens.length < Number(most);) {
        feeds.input_ids = new ort.Tensor('int64', [BigInt(token)], [1, 1]);
        feeds.use_cache_branch = new ort.Tensor('bool', [tokens.length > 0], [1]);
        const out = await decoder.run(feeds), logits = out.logits.data;
        for (const name of cacheNames)
          if (tokens.length == 0 || !name.includes('encoder'))
            feeds[name] = out[name.replace('past_key_values', 'present')];
        token = 0;
        for (let n = 1; n < logits.length; ++n) if (logits[n] > logits[token]) token = n;
        if (token == 2) break;
        tokens.push(token);
      }
      best = [Math.min(best[0], between - start), Math.min(best[1], now() - between)];
    }
    console.log(...best, ...tokens);
  }
})().catch(error => { console.error(error); process.exit(1); });
)";
  const auto stamp = std::chrono::steady_clock::now().time_since_epoch().count();
  const auto folder = std::filesystem::temp_directory_path() / ("attn_speech_" + std::to_string(stamp));
  const auto path = [&](const std::string& name) { return (folder / name).string(); };
  std::filesystem::create_directories(folder);
  std::ofstream(path("script")) << script;
  std::ofstream jobs(path("jobs"));
  jobs << std::filesystem::absolute(encoder).string() << '\n' << std::filesystem::absolute(decoder).string() << '\n';
  for (std::size_t n = 0; n < sounds.size(); ++n) {
    const std::string sound = path(std::to_string(n));
    std::ofstream(sound, std::ios::binary)
        .write(reinterpret_cast<const char*>(sounds[n].data()), std::streamsize(sizeof(float) * sounds[n].size()));
    jobs << most_tokens(std::ssize(sounds[n])) << ' ' << sound << '\n';
  }
  jobs.close();
  const std::string command = "node - \"" + path("jobs") + "\" < \"" + path("script") + "\" > \"" + path("out") +
                              "\" 2> \"" + path("errors") + "\"";
  std::vector<transcript> result;
  if (std::system(command.c_str()) == 0) {
    std::istringstream lines(support::read_file(path("out")));
    for (std::string line; std::getline(lines, line);) {
      std::istringstream numbers(line);
      transcript& t = result.emplace_back();
      numbers >> t.encoder >> t.decoder;
      for (std::ptrdiff_t token; numbers >> token;) t.tokens.push_back(token);
    }
  }
  std::filesystem::remove_all(folder);
  return result;
}

}  // namespace speech
