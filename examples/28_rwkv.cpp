// RWKV-5.2 and RWKV-7, trained recurrences, as files of rwkv.cpp have them: bytes in, bytes out, in constant memory.
// Version 5.2 is linear attention with decays and a bonus, version 7 the generalised delta rule; between them lie
// projections, the shift of tokens and a norm of each head. A prompt is read at once, what follows byte by byte, by the
// same functions: they take any number of tokens. At the end the whole text is read at once, and must give the same.
//
//   28_rwkv [MODEL.bin [PROMPT]] [--bytes=200] [--expected=LOGITS.bin]
//
// Without a model two small ones are drawn at random, one of each version, and what they write is noise. LOGITS.bin has
// 256 floats: what the model has to give after the prompt, within 2e-5.
#include <attn/kernel/dplr_step.hpp>
#include <attn/kernel/linear_step.hpp>
#include <attn/layers/group_norm.hpp>
#include <attn/layers/layer_norm.hpp>
#include <attn/layers/project.hpp>
#include <attn/layers/token_shift.hpp>

#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "rwkv/weights.hpp"

namespace rwkv {

constexpr float most_difference = 2e-5f;

matrix project(const matrix& x, const matrix& weight) {
  matrix out(x.rows(), weight.rows());
  attn::project(x, out, {.weight = weight});
  return out;
}
// x mixed with the token before each: `last` before the first one.
matrix shift(const matrix& x, const matrix& last, const matrix& mix) {
  matrix out(x.rows(), x.cols());
  attn::token_shift(x, out, {.mix = mix}, {.initial_state = last});
  return out;
}
auto by_head(const matrix& x, idx_t heads) { return attn::split_heads(x, heads); }
auto by_head(matrix& x, idx_t heads) { return attn::split_heads(x, heads); }
void multiply_rows(matrix& x, const matrix& by) { x.array().rowwise() *= by.row(0).array(); }
void add_rows(matrix& x, const matrix& what) { x.rowwise() += what.row(0); }

struct norm {
  matrix gamma, beta;
  norm(const weights& w, const std::string& name) : gamma(w.row(name + ".weight")), beta(w.row(name + ".bias")) {}
  matrix operator()(const matrix& x) const {
    matrix out(x.rows(), x.cols());
    attn::layer_norm(x, out, {.gamma = gamma, .beta = beta});
    return out;
  }
};

// Time mixing of version 5.2: every channel of a head has its decay and its bonus, the same for all tokens.
struct mixing_5 {
  using state = attn::linear_state<float>;
  static state make_state(const weights& w) {
    return state({.heads = w.heads, .features = w.width / w.heads, .value_dim = w.width / w.heads});
  }
  idx_t heads;
  matrix mix_r, mix_k, mix_v, mix_g, receptance, key, value, gate, output, log_decay, bonus;
  norm last_norm;

  mixing_5(const weights& w, const std::string& name)
      : heads(w.heads), receptance(w.square(name + "receptance.weight")), key(w.square(name + "key.weight")),
        value(w.square(name + "value.weight")), gate(w.square(name + "gate.weight")),
        output(w.square(name + "output.weight")), log_decay(w.row(name + "time_decay")),
        bonus(w.get(name + "time_faaaa", heads, w.width / heads)), last_norm(w, name + "ln_x") {
    const auto mix = [&](const char* of) -> matrix { return 1 - w.row(name + of).array(); };  // stored from the token
    mix_r = mix("time_mix_r"), mix_k = mix("time_mix_k"), mix_v = mix("time_mix_v"), mix_g = mix("time_mix_g");
    if (w.path.empty()) log_decay = log_decay.array().logistic();
    log_decay = log_decay.array().log();
  }
  matrix operator()(const matrix& x, const matrix& last, state& sums, matrix&) const {
    const matrix r = project(shift(x, last, mix_r), receptance), k = project(shift(x, last, mix_k), key),
                 v = project(shift(x, last, mix_v), value), g = project(shift(x, last, mix_g), gate);
    matrix out(x.rows(), x.cols());
    const idx_t dim = x.cols() / heads;
    const attn::tensor_view<const float> same_decays(log_decay.data(), {1, heads, x.rows(), dim}, {0, dim, 0, 1});
    attn::linear_step(sums, by_head(r, heads), by_head(k, heads), by_head(v, heads), by_head(out, heads),
                      {.normalise = false, .log_decay = same_decays, .bonus = bonus}, attn::feature_maps::identity{});
    attn::group_norm(out, out, {.gamma = last_norm.gamma, .beta = last_norm.beta}, {.heads = heads, .eps = 1e-5f});
    out.array() *= g.array() * g.array().logistic();
    return project(out, output);
  }
};

// Time mixing of version 7: decays depend on the token, and what a key recalls is replaced at the rate `a`.
struct mixing_7 {
  using state = attn::dplr_state<float>;
  static state make_state(const weights& w) {
    return state({.heads = w.heads, .dim = w.width / w.heads, .value_dim = w.width / w.heads});
  }
  // offset + up f(down x), the small layers that give decays, rates and gates.
  struct low_rank {
    matrix down, up, offset;
    low_rank(const weights& w, const std::string& name)
        : down(w.get(name + "1", -1, w.width)), up(w.get(name + "2", w.width, down.rows())),
          offset(name.ends_with("g") ? matrix::Zero(1, w.width) : w.row(name + "0")) {}
    template <class F>
    matrix operator()(const matrix& x, F f) const {
      const matrix hidden = f(project(x, down).array());
      matrix out = project(hidden, up);
      add_rows(out, offset);
      return out;
    }
  };
  idx_t heads;
  matrix mixes, receptance, key, value, output, unit_key, rate_key, bonus;
  low_rank decay, rate, first_values, gate;
  norm last_norm;
  bool first;

  mixing_7(const weights& w, const std::string& name)
      : heads(w.heads), mixes(w.get(name + "x_rwkvag", 6, w.width)), receptance(w.square(name + "receptance.weight")),
        key(w.square(name + "key.weight")), value(w.square(name + "value.weight")),
        output(w.square(name + "output.weight")), unit_key(w.row(name + "k_k")), rate_key(w.row(name + "k_a")),
        bonus(w.row(name + "r_k")), decay(w, name + "w"), rate(w, name + "a"),
        first_values(w, name + (name.starts_with("blocks.0.") ? "a" : "v")),  // the first layer has none, uses none
        gate(w, name + "g"), last_norm(w, name + "ln_x"), first(name.starts_with("blocks.0.")) {}

  matrix operator()(const matrix& x, const matrix& last, state& sums, matrix& v_of_first) const {
    const auto shifted = [&](idx_t n) { return shift(x, last, mixes.row(n)); };
    const auto same = [](const auto& h) -> matrix { return h; };
    const matrix r = project(shifted(0), receptance);
    const auto tanh = [](const auto& h) -> matrix { return h.tanh(); };
    const matrix w = -0.606531f * decay(shifted(1), tanh).array().logistic();
    matrix k = project(shifted(2), key), v = project(shifted(3), value);
    const matrix a = rate(shifted(4), same).array().logistic();
    const matrix g = gate(shifted(5), [](const auto& h) -> matrix { return h.logistic(); });
    if (first) v_of_first = v;
    else v.array() += (v_of_first - v).array() * first_values(shifted(3), same).array().logistic();

    const idx_t dim = x.cols() / heads;
    matrix unit = k, minus_unit, replaced, scaled = a.array() - 1, out(x.rows(), x.cols());
    multiply_rows(unit, unit_key);
    for (idx_t h = 0; h < heads; ++h)
      for (idx_t t = 0; t < x.rows(); ++t) unit.row(t).segment(h * dim, dim).normalize();
    minus_unit = -unit, replaced = unit.cwiseProduct(a);
    multiply_rows(scaled, rate_key);
    k.array() *= 1 + scaled.array();
    attn::dplr_step(sums, by_head(r, heads), by_head(k, heads), by_head(v, heads), by_head(minus_unit, heads),
                    by_head(replaced, heads), by_head(out, heads), {.scale = 1.0f, .log_decay = by_head(w, heads)});
    attn::group_norm(out, out, {.gamma = last_norm.gamma, .beta = last_norm.beta}, {.heads = heads, .eps = 64e-5f});
    matrix own = r.cwiseProduct(k);
    multiply_rows(own, bonus);
    for (idx_t h = 0; h < heads; ++h) {
      const Eigen::VectorXf weight = own.middleCols(h * dim, dim).rowwise().sum();
      out.middleCols(h * dim, dim) += weight.asDiagonal() * v.middleCols(h * dim, dim);
    }
    out = out.cwiseProduct(g);
    return project(out, output);
  }
};

template <class Mixing>
class model {
 public:
  struct layer_state {
    matrix last, last_fed;  // the tokens before, as each part of the layer saw them
    typename Mixing::state sums;
  };
  using state = std::vector<layer_state>;

  explicit model(const weights& w)
      : embedding_(w.get("emb.weight", vocabulary, w.width)), head_(w.get("head.weight", vocabulary, w.width)),
        first_norm_(w, "blocks.0.ln0"), last_norm_(w, "ln_out"),
        empty_(std::size_t(w.layers), {matrix::Zero(1, w.width), matrix::Zero(1, w.width), Mixing::make_state(w)}) {
    for (idx_t n = 0; n < w.layers; ++n) layers_.emplace_back(w, "blocks." + std::to_string(n) + ".");
  }
  state start() const { return empty_; }

  /// The logits after each byte; `from` is then after the last one.
  matrix feed(std::string_view bytes, state& from) const {
    matrix x(std::ssize(bytes), embedding_.cols()), first_values;
    for (idx_t t = 0; t < x.rows(); ++t) x.row(t) = embedding_.row(static_cast<unsigned char>(bytes[std::size_t(t)]));
    x = first_norm_(x);
    for (std::size_t n = 0; n < layers_.size() && x.rows() > 0; ++n) {
      const layer& l = layers_[n];
      layer_state& s = from[n];
      matrix y = l.norm_1(x);
      x += l.mixing(y, s.last, s.sums, first_values);
      s.last = y.bottomRows(1);
      y = l.norm_2(x);
      const matrix hidden = project(shift(y, s.last_fed, l.mix_k), l.key).cwiseMax(0).array().square();
      matrix out = project(hidden, l.value);
      if (l.receptance.size() > 0)
        out.array() *= project(shift(y, s.last_fed, l.mix_r), l.receptance).array().logistic();
      x += out;
      s.last_fed = y.bottomRows(1);
    }
    return project(last_norm_(x), head_);
  }

 private:
  struct layer {
    norm norm_1, norm_2;
    Mixing mixing;
    matrix mix_k, mix_r, key, value, receptance;  // of channel mixing

    layer(const weights& w, const std::string& name)
        : norm_1(w, name + "ln1"), norm_2(w, name + "ln2"), mixing(w, name + "att."),
          key(w.get(name + "ffn.key.weight", -1, w.width)),
          value(w.get(name + "ffn.value.weight", w.width, key.rows())) {
      mix_k = w.row(name + (w.version_7 ? "ffn.x_k" : "ffn.time_mix_k"));
      if (w.version_7) return;
      mix_k = 1 - mix_k.array(), mix_r = 1 - w.row(name + "ffn.time_mix_r").array();
      receptance = w.square(name + "ffn.receptance.weight");
    }
  };
  matrix embedding_, head_;
  norm first_norm_, last_norm_;
  state empty_;
  std::vector<layer> layers_;
};

struct task {
  std::string prompt = "\"in", expected;
  int bytes = 200;
};

template <class Mixing>
int run(const weights& w, const task& to_do) {
  const model<Mixing> trained(w);
  auto state = trained.start(), fresh = trained.start();
  matrix logits = trained.feed(to_do.prompt, state).bottomRows(1);
  std::printf("RWKV-%s, %td layers of %td\n", w.version_7 ? "7" : "5.2", w.layers, w.width);
  bool right = true;
  if (!to_do.expected.empty()) {
    const auto x = support::array_of<float>(to_do.expected, {1, vocabulary}, support::read_file(to_do.expected));
    const float most = (logits - Eigen::Map<const matrix>(x.numbers.data(), 1, vocabulary)).cwiseAbs().maxCoeff();
    std::printf("logits after the prompt differ by %.1e at most from those expected\n", most);
    right = most <= most_difference;
  }
  std::string text = to_do.prompt;
  matrix steps(to_do.bytes, vocabulary);
  const auto seconds = [start = std::chrono::steady_clock::now()] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  for (int n = 0; n < to_do.bytes; ++n) {
    idx_t next = 0;
    logits.row(0).maxCoeff(&next);
    text += static_cast<char>(next);
    logits = trained.feed({&text.back(), 1}, state);
    steps.row(n) = logits;
  }
  const double alone = seconds();
  const matrix all = trained.feed(text, fresh);
  const double at_once = seconds() - alone;
  const float most = to_do.bytes > 0 ? (all.bottomRows(to_do.bytes) - steps).cwiseAbs().maxCoeff() : 0;
  std::size_t size = 0;
  for (const auto& s : state) size += s.sums.bytes() + 2 * sizeof(float) * std::size_t(w.width);
  if (!w.path.empty()) std::printf("\n%s\n\n", text.c_str());
  std::printf("byte by byte %.2f ms each, the whole text at once %.2f; a state of %zu bytes\n",
              1e3 * alone / std::max(to_do.bytes, 1), 1e3 * at_once / double(text.size()), size);
  std::printf("logits of both differ by %.1e at most, the largest is %.1f\n", most, all.cwiseAbs().maxCoeff());
  return right && most <= most_difference * std::max(1.0f, all.cwiseAbs().maxCoeff()) ? 0 : 1;
}

int run(const std::vector<std::string>& arguments) {
  task to_do;
  std::vector<std::string> others;
  for (const std::string& x : arguments) {
    if (x.starts_with("--bytes=")) {
      const auto [end, error] = std::from_chars(x.data() + 8, x.data() + x.size(), to_do.bytes);
      if (error != std::errc() || end != x.data() + x.size() || to_do.bytes < 0 || to_do.bytes > 100000)
        throw std::runtime_error("--bytes=: expected a number from 0 to 100000; found " + x.substr(8));
    } else if (x.starts_with("--expected=")) {
      to_do.expected = x.substr(11);
    } else if (x.starts_with("--") || others.size() == 2) {
      throw std::runtime_error("usage: 28_rwkv [MODEL.bin [PROMPT]] [--bytes=N] [--expected=LOGITS.bin]");
    } else {
      others.push_back(x);
    }
  }
  if (others.size() > 1) to_do.prompt = others[1];
  if (to_do.prompt.empty()) throw std::runtime_error("PROMPT: expected one byte or more; found none");
  if (others.empty()) return run<mixing_5>(weights(false), to_do) + run<mixing_7>(weights(true), to_do);
  const weights w(others[0]);
  return w.version_7 ? run<mixing_7>(w, to_do) : run<mixing_5>(w, to_do);
}

}  // namespace rwkv

int main(int argc, char** argv) try {
  return rwkv::run({argv + 1, argv + argc});
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
