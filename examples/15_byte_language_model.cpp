// A language model of bytes, trained from nothing: a decoder of pre-norm blocks around any causal operator of the
// library, or, with --masked, an encoder around any bidirectional one, which learns to find masked bytes.
//
//   15_byte_language_model                                   trains on this machine's licences, or on this library
//   15_byte_language_model my.txt --operator linear --save weights --prompt "Once "
//   15_byte_language_model my.txt --operator linear --load weights --steps 0 --prompt "Once "
//   15_byte_language_model --compare --steps 300             every operator: a table, curves as .csv and as a picture
//
// Other options, and their values if not given: --layers 4 --width 256 --heads 4 --context 512 --batch 8 --steps 800
// --rate 0.002 --seed 1 --threads (all) --temperature 0.7 --bytes 300 (after the prompt), --reversible (the memory of
// training does not grow with the layers). The last tenth of the text is held out. One seed gives the same model with
// any number of threads.
#include <attn/attn.hpp>
#include <attn/fourier/fnet_backward.hpp>
#include <attn/layers/encoder_block_backward.hpp>
#include <attn/layers/multi_head_backward.hpp>
#include <attn/layers/reversible_block_backward.hpp>
#include <attn/low_rank/linformer_backward.hpp>
#include <attn/low_rank/nystrom_backward.hpp>
#include <attn/softmax/bigbird_backward.hpp>
#include <attn/softmax/block_backward.hpp>
#include <attn/softmax/full_softmax_backward.hpp>
#include <attn/softmax/lsh_backward.hpp>
#include <attn/softmax/sliding_window_backward.hpp>
#include <attn/softmax/strided_backward.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

namespace {

using attn::execution, attn::index, attn::split_heads;
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using tensor = attn::tensor<float, 3>;  // [batch, length, width]
using sequence = attn::tensor_view<const float, 3>;
using sequence_out = attn::tensor_view<float, 3>;
using in = attn::tensor_view<const float>;  // [batch, heads, length, dim]
using to = attn::tensor_view<float>;

struct settings {
  std::vector<std::string> files{};
  std::string op = "full_softmax", load{}, save{}, prompt{};
  bool masked = false, reversible = false, compare = false, self_test = false;
  index layers = 4, width = 256, heads = 4, context = 512, batch = 8, steps = 800, bytes = 300, seed = 1;
  index threads = std::max(1u, std::thread::hardware_concurrency());
  double rate = 2e-3, temperature = 0.7;
};

[[noreturn]] void fail(const std::string& message) { throw std::runtime_error(message); }

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The operators -------------------------------------------------------------------------------------------------------

// What a block calls its operator with, and its backward pass.
struct call {
  in q, k, v;
  to out;
  attn::tensor_view<float, 3> lse;
  const matrix& own;  // parameters that the operator itself learns
  execution& exec;
  in d_out{};
  to dq{}, dk{}, dv{};
  matrix* d_own = nullptr;
};
using operation = std::function<void(const call&)>;

struct own_parameters {
  index rows = 0, columns = 0;
  double deviation = 0;  // of the normal numbers that training starts from
};

struct mixer {
  std::string name;
  operation forward, backward;
  std::function<operation()> stream{};  // makes one with a state of its own, for tokens as they come
  own_parameters own{};
  bool keys = true, projects = true;  // are there projections for keys, any at all?
};

// An operator with its options, which are the same for all calls but for the lse.
mixer with_options(const std::string& name, const auto& options, const auto& forward, const auto& backward) {
  const auto bind = [&options](const auto& f) {
    return [options, f](const call& c) {
      auto given = options;
      if constexpr (requires { given.lse; }) given.lse = c.lse;
      f(c, given);
    };
  };
  return {name, bind(forward), bind(backward)};
}

mixer with_stream(mixer m, const auto& state, const auto& step) {
  m.stream = [=] { return [state = state, step](const call& c) mutable { step(state, c); }; };
  return m;
}

// One entry an operator.
std::vector<mixer> mixers(const settings& s) {
  const bool causal = !s.masked;
  const index dim = s.width / s.heads, near = std::min<index>(64, s.context / 4);
  const attn::state_extents extents{.heads = s.heads, .dim = dim};
  std::vector<mixer> list;
  // clang-format off
  list.push_back(with_stream(with_options("full_softmax", attn::full_softmax_options<float>{.causal = causal},
      [](auto& c, auto& o) { attn::full_softmax(c.q, c.k, c.v, c.out, o, c.exec); },
      [](auto& c, auto& o) { attn::full_softmax_backward(c.q, c.k, c.v, c.out, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, o, c.exec); }),
      attn::kv_cache<float>(extents), [](auto& cache, auto& c) { attn::full_softmax_step(cache, c.q, c.k, c.v, c.out, c.exec); }));
  list.push_back(with_stream(with_options("sliding_window", attn::sliding_window_options<float>{.causal = causal, .left = near, .right = causal ? 0 : near},
      [](auto& c, auto& o) { attn::sliding_window(c.q, c.k, c.v, c.out, o, c.exec); },
      [](auto& c, auto& o) { attn::sliding_window_backward(c.q, c.k, c.v, c.out, c.d_out, {.q = c.dq, .k = c.dk, .v = c.dv}, o, c.exec); }),
      attn::sliding_window_cache<float>(extents, {.left = near}), [](auto& cache, auto& c) { attn::sliding_window_step(cache, c.q, c.k, c.v, c.out, c.exec); }));
  // clang-format on
  return list;
}

const mixer& mixer_of(const std::vector<mixer>& list, const std::string& name) {
  std::string names;
  for (const mixer& m : list) {
    if (m.name == name) return m;
    names += ' ' + m.name;
  }
  fail("no operator here is called " + name + "; these are there:" + names);
}

// The model -----------------------------------------------------------------------------------------------------------

struct parameter {
  std::string name;
  matrix value, gradient, mean, square;  // the last two are Adam's
};

struct block {
  parameter &gamma_1, &beta_1, &query, &key, &value, &output, &own, &gamma_2, &beta_2, &up, &down;
};

constexpr int byte_count = 256, mask = byte_count;  // the mask is one more token

// What a pass leaves behind: to train, the input of every block and what its operator made of it; otherwise, and with
// reversible blocks, those of one block.
struct activations {
  index length;
  bool keep;
  std::vector<tensor> x, mixed, attended, lse;
  tensor remainder, sum, normed, logits, dx, d_normed;

  activations(const settings& s, index batch, index tokens, bool train)
      : length(tokens), keep(train && !s.reversible) {
    const auto make = [&](index width) { return tensor({batch, length, width}); };
    const std::size_t kept = keep ? s.layers : 1;
    const index stream = s.reversible ? 2 * s.width : s.width;
    x.assign(keep ? kept + 1 : 1, make(stream));
    if (keep) mixed.assign(kept, make(s.width));
    attended.assign(kept, make(s.width));
    lse.assign(kept, tensor({batch, s.heads, length}));
    if (s.reversible) remainder = make(stream), sum = make(s.width);
    normed = make(s.width);
    logits = make(byte_count);
    if (train) dx = make(stream), d_normed = make(s.width);
  }
  std::size_t bytes() const {
    index numbers = remainder.size() + sum.size() + normed.size() + logits.size() + dx.size() + d_normed.size();
    for (const auto* list : {&x, &mixed, &attended, &lse})
      for (const tensor& t : *list) numbers += t.size();
    return sizeof(float) * numbers;
  }
};

auto rows_of(tensor& t) { return Eigen::Map<matrix>(t.data(), t.extent(0) * t.extent(1), t.extent(2)); }

// One block at work. With reversible blocks, the mixer and the feed-forward layer each have a half of the sequence.
struct working_block {
  const settings& s;
  const mixer& op;
  const operation& mix_heads;
  activations& a;
  block& b;
  index n;  // of the block

  index slot() const { return a.keep ? n : 0; }
  attn::encoder_block_weights<float> weights() const {
    return {.norm_1 = {b.gamma_1.value.row(0), b.beta_1.value.row(0)},
            .norm_2 = {b.gamma_2.value.row(0), b.beta_2.value.row(0)},
            .feed_forward = {.up = b.up.value, .down = b.down.value}};
  }
  // The halves of a reversible block.
  auto mixing() const {
    return [this](sequence x, sequence_out out, execution& e) {
      attn::layer_norm(x, a.normed, weights().norm_1, {}, e);
      mix(a.normed, out, e);
    };
  }
  auto feeding() const {
    return [this](sequence x, sequence_out out, execution& e) {
      attn::layer_norm(x, a.normed, weights().norm_2, {}, e);
      attn::feed_forward(a.normed, out, weights().feed_forward, {}, e);
    };
  }
  attn::multi_head_weights<float> attention() const {
    return {.query = b.query.value, .key = b.key.value, .value = b.value.value, .output = b.output.value};
  }
  call call_of(in q, in k, in v, to out, execution& exec) const {
    return {.q = q, .k = k, .v = v, .out = out, .lse = a.lse[slot()], .own = b.own.value, .exec = exec};
  }

  void mix(sequence x, sequence_out out, execution& exec) const {
    if (!op.projects) return mix_heads(call_of(split_heads(x, 1), {}, {}, split_heads(out, 1), exec));
    const auto attend = [this](in q, in k, in v, to o, execution& e) { mix_heads(call_of(q, k, v, o, e)); };
    attn::multi_head(x, out, attention(), attend, {.heads = s.heads, .attended = a.attended[slot()]}, exec);
  }
  void mix_backward(sequence x, sequence d_out, sequence_out dx, execution& exec) const {
    const auto backward = [this](call c, in d, to dq, to dk, to dv) {
      c.d_out = d, c.dq = dq, c.dk = dk, c.dv = dv, c.d_own = &b.own.gradient;
      op.backward(c);
    };
    if (!op.projects) return backward(call_of(split_heads(x, 1), {}, {}, {}, exec), split_heads(d_out, 1), split_heads(dx, 1), {}, {});
    const auto attend = [this](in q, in k, in v, to o, execution& e) { mix_heads(call_of(q, k, v, o, e)); };
    const auto attend_backward = [&](in q, in k, in v, in, in d, to dq, to dk, to dv, execution& e) {
      backward(call_of(q, k, v, split_heads(a.attended[slot()].view(), s.heads), e), d, dq, dk, dv);
    };
    attn::multi_head_backward(x, attention(), attend, attend_backward, d_out,
                              {.x = dx, .query = b.query.gradient, .key = b.key.gradient, .value = b.value.gradient, .output = b.output.gradient},
                              {.heads = s.heads, .attended = a.attended[slot()]}, exec);
  }

  // From x to the input of the next block, and back from the gradient of that.
  void forward(execution& exec) const {
    if (s.reversible) return attn::reversible_block(a.x[0], a.x[0], mixing(), feeding(), {.remainder = a.remainder}, exec);
    const auto mixer = [this](sequence x, sequence_out out, execution& e) { mix(x, out, e); };
    attn::encoder_block_options<float> options;
    if (a.keep) options.mixed = a.mixed[n];
    attn::encoder_block(a.x[slot()], a.x[a.keep ? n + 1 : 0], weights(), mixer, options, exec);
  }
  void backward(execution& exec) const {
    const attn::layer_norm_weight_gradients<float> d_norm_1{b.gamma_1.gradient.row(0), b.beta_1.gradient.row(0)},
        d_norm_2{b.gamma_2.gradient.row(0), b.beta_2.gradient.row(0)};
    if (!s.reversible) {
      const auto mixer = [this](sequence x, sequence_out out, execution& e) { mix(x, out, e); };
      const auto mixer_backward = [this](sequence x, sequence, sequence d, sequence_out dx, execution& e) { mix_backward(x, d, dx, e); };
      return attn::encoder_block_backward(a.x[n], weights(), mixer, mixer_backward, a.dx,
          {.x = a.dx, .norm_1 = d_norm_1, .norm_2 = d_norm_2, .feed_forward = {.up = b.up.gradient, .down = b.down.gradient}},
          {.mixed = a.mixed[n]}, exec);
    }
    // Each half was just computed again, so that a.normed is what went into it.
    const auto mixing_backward = [&](sequence x, sequence, sequence d, sequence_out dx, execution& e) {
      mix_backward(a.normed, d, a.d_normed, e);
      attn::layer_norm_backward(x, weights().norm_1, a.d_normed, {.x = dx, .gamma = d_norm_1.gamma, .beta = d_norm_1.beta}, {}, e);
    };
    const auto feeding_backward = [&](sequence x, sequence, sequence d, sequence_out dx, execution& e) {
      attn::feed_forward_backward(a.normed, weights().feed_forward, d, {.x = a.d_normed, .up = b.up.gradient, .down = b.down.gradient}, {}, e);
      attn::layer_norm_backward(x, weights().norm_2, a.d_normed, {.x = dx, .gamma = d_norm_2.gamma, .beta = d_norm_2.beta}, {}, e);
    };
    attn::reversible_block_backward(a.x[0], a.x[0], mixing(), feeding(), mixing_backward, feeding_backward, a.dx, {.x = a.dx}, {.remainder = a.remainder}, exec);
  }
};

struct model {
  settings s;
  mixer op;
  std::deque<parameter> parameters{};
  std::deque<block> blocks{};
  index updates = 0;

  model(const settings& given, const mixer& chosen) : s(given), op(chosen) {
    attn::random_numbers random(static_cast<std::uint64_t>(s.seed));
    const auto add = [&](const std::string& name, index rows, index columns, double deviation, double mean = 0) -> parameter& {
      const matrix zeros = matrix::Zero(rows, columns);
      parameter& p = parameters.emplace_back(parameter{name, zeros, zeros, zeros, zeros});
      for (index n = 0; n < p.value.size(); ++n) p.value.data()[n] = float(mean + deviation * random.normal());
      return p;
    };
    const index w = s.width, projected = op.projects ? w : 0;
    const double unit = 1 / std::sqrt(double(w)), last = unit / std::sqrt(2. * double(s.layers));
    add("embedding", byte_count + 1, w, unit);
    add("positions", s.context, w, unit);
    add("gamma", 1, w, 0, 1);
    add("beta", 1, w, 0);
    for (index n = 0; n < s.layers; ++n) {
      const std::string name = "block_" + std::to_string(n) + "_";
      blocks.push_back({.gamma_1 = add(name + "gamma_1", 1, w, 0, 1),
                        .beta_1 = add(name + "beta_1", 1, w, 0),
                        .query = add(name + "query", projected, w, unit),
                        .key = add(name + "key", op.keys ? projected : 0, w, unit),
                        .value = add(name + "value", projected, w, unit),
                        .output = add(name + "output", projected, w, last),
                        .own = add(name + op.name, op.own.rows, op.own.columns, op.own.deviation),
                        .gamma_2 = add(name + "gamma_2", 1, w, 0, 1),
                        .beta_2 = add(name + "beta_2", 1, w, 0),
                        .up = add(name + "up", 4 * w, w, unit),
                        .down = add(name + "down", w, 4 * w, last / 2)});
    }
  }
  parameter& embedding() { return parameters[0]; }
  parameter& positions() { return parameters[1]; }
  attn::project_weights<float> output() { return {.weight = embedding().value.topRows(byte_count)}; }
  attn::layer_norm_weights<float> norm() { return {parameters[2].value.row(0), parameters[3].value.row(0)}; }
  sequence last(activations& a) const { return s.reversible ? a.sum : a.x.back(); }
  working_block at(index n, activations& a, const operation& mix_heads) { return {s, op, mix_heads, a, blocks[n], n}; }

  // The logits of what follows each token, or of what is masked there; the first token is at position `first`. The
  // operators are those of the parallel form, or streams, one for each block.
  void forward(activations& a, const std::vector<int>& tokens, execution& exec, index first = 0, const std::vector<operation>& streams = {}) {
    auto x = rows_of(a.x[0]);
    for (index n = 0; n < x.rows(); ++n) {
      x.row(n).head(s.width) = embedding().value.row(tokens[n]) + positions().value.row(first + n % a.length);
      if (s.reversible) x.row(n).tail(s.width) = x.row(n).head(s.width);
    }
    rows_of(a.remainder).setZero();
    for (index n = 0; n < s.layers; ++n) at(n, a, streams.empty() ? op.forward : streams[n]).forward(exec);
    if (s.reversible) rows_of(a.sum) = x.leftCols(s.width) + x.rightCols(s.width);
    attn::layer_norm(last(a), a.normed, norm(), {}, exec);
    attn::project(a.normed, a.logits, output(), exec);
  }

  // The gradients of all parameters from that of the logits, which stands in their place.
  void backward(activations& a, const std::vector<int>& tokens, execution& exec) {
    for (parameter* p : {&embedding(), &positions()}) p->gradient.setZero();
    const sequence_out d = a.dx.view().slice(2, 0, s.width);
    attn::project_backward(a.normed, output(), a.logits, {.x = a.d_normed, .weight = embedding().gradient.topRows(byte_count)}, exec);
    attn::layer_norm_backward(last(a), norm(), a.d_normed, {.x = d, .gamma = parameters[2].gradient.row(0), .beta = parameters[3].gradient.row(0)}, {}, exec);
    auto dx = rows_of(a.dx);
    if (s.reversible) dx.rightCols(s.width) = dx.leftCols(s.width);
    for (index n = s.layers; n-- > 0;) at(n, a, op.forward).backward(exec);
    if (s.reversible) dx.leftCols(s.width) += dx.rightCols(s.width);
    for (index n = 0; n < dx.rows(); ++n) {
      embedding().gradient.row(tokens[n]) += dx.row(n).head(s.width);
      positions().gradient.row(n % a.length) += dx.row(n).head(s.width);
    }
  }

  // Adam (Kingma & Ba 2015), the gradient clipped to norm 1, with a rate that rises over the first steps and falls by a
  // cosine to nothing.
  void update(execution& exec) {
    double square = 0;
    for (const parameter& p : parameters) square += p.gradient.squaredNorm();
    const double warm_up = std::min(100., 0.1 * s.steps), t = ++updates;
    const double rate = s.rate * std::min(t / warm_up, 0.5 + 0.5 * std::cos(3.14159265358979 * t / (s.steps + 1.)));
    const float b1 = 0.9f, b2 = 0.99f, clip = float(1 / std::max(1., std::sqrt(square)));
    const float by = float(rate / (1 - std::pow(b1, t))), root = float(1 / (1 - std::pow(b2, t)));
    exec.for_each(std::ssize(parameters), [&](index n, int) {
      parameter& p = parameters[n];
      p.mean = b1 * p.mean + (1 - b1) * clip * p.gradient;
      p.square.array() = b2 * p.square.array() + (1 - b2) * (clip * p.gradient.array()).square();
      p.value.array() -= by * p.mean.array() / ((root * p.square.array()).sqrt() + 1e-8f);
    });
  }
  std::size_t bytes() const {
    index numbers = 0;
    for (const parameter& p : parameters) numbers += 4 * p.value.size();
    return sizeof(float) * numbers;
  }
};

// The text ------------------------------------------------------------------------------------------------------------

struct corpus {
  std::string train, held;
  double frequency_bits = 0;  // a byte of what is held out, from how often each byte is in the rest
};

corpus split(const std::string& text, index context) {
  const std::size_t held = text.size() / 10, least = static_cast<std::size_t>(context) + 1;
  if (held < least)
    fail("expected a text of at least " + std::to_string(10 * least) + " bytes, to hold out a tenth in which the context of " +
         std::to_string(context) + " fits; found " + std::to_string(text.size()));
  corpus c{text.substr(0, text.size() - held), text.substr(text.size() - held)};
  std::vector<double> count(byte_count, 1);
  for (const unsigned char byte : c.train) ++count[byte];
  for (const unsigned char byte : c.held)
    c.frequency_bits -= std::log2(count[byte] / double(c.train.size() + byte_count)) / double(held);
  return c;
}

std::string read_text(std::vector<std::string> files) {
  namespace fs = std::filesystem;
  if (files.empty())
    for (const char* folder : {"/usr/share/common-licenses", "include/attn", "../include/attn", "../../include/attn"}) {
      if (!fs::is_directory(folder)) continue;
      for (const auto& entry : fs::recursive_directory_iterator(folder))
        if (entry.is_regular_file() && !entry.is_symlink()) files.push_back(entry.path().string());
      if (!files.empty()) break;
    }
  if (files.empty()) fail("there is no text here to learn from: name a file");
  std::sort(files.begin(), files.end());
  std::string text;
  for (const std::string& name : files) {
    std::ifstream file(name, std::ios::binary);
    if (!file || fs::is_directory(name)) fail("file not found: " + name);
    text.append(std::istreambuf_iterator<char>(file), {});
  }
  return text;
}

// Windows of the text, one after the other: tokens, and what is to be found at each of them, or -1.
struct examples {
  std::vector<int> tokens{}, targets{};

  void add(const std::string& text, index begin, const settings& s, attn::random_numbers& random) {
    for (index n = begin; n < begin + s.context; ++n) {
      const int byte = static_cast<unsigned char>(text[n]), next = static_cast<unsigned char>(text[n + 1]);
      const bool hidden = s.masked && random.below(100) < 15;
      tokens.push_back(hidden ? mask : byte);
      targets.push_back(!s.masked ? next : hidden ? byte : -1);
    }
  }
};

// The mean loss in bits; the logits become its gradient.
double loss(tensor& logits, const std::vector<int>& targets, execution& exec) {
  auto rows = rows_of(logits);
  const double count = std::max<double>(1, std::count_if(targets.begin(), targets.end(), [](int t) { return t >= 0; }));
  std::vector<double> bits(targets.size());
  exec.for_each((rows.rows() + 63) / 64, [&](index task, int) {
    for (index n = 64 * task; n < std::min(rows.rows(), 64 * task + 64); ++n) {
      auto row = rows.row(n).array();
      if (targets[n] < 0) {
        row = 0;
        continue;
      }
      row -= row.maxCoeff();
      const float logit = row[targets[n]];
      row = row.exp();
      const float sum = row.sum();
      bits[n] = (std::log(double(sum)) - logit) / std::log(2.);
      row *= float(1 / (sum * count));
      row[targets[n]] -= float(1 / count);
    }
  });
  double sum = 0;
  for (const double b : bits) sum += b;
  return sum / count;
}

// Training ------------------------------------------------------------------------------------------------------------

double held_out_bits(model& m, const std::string& text, execution& exec) {
  settings s = m.s;
  activations a(s, 1, s.context, false);
  const index windows = std::min<index>(64, (std::ssize(text) - 1) / s.context);
  attn::random_numbers masks(7);
  double bits = 0;
  for (index n = 0; n < windows; ++n) {
    examples one;
    one.add(text, n * (std::ssize(text) - 1 - s.context) / std::max<index>(1, windows - 1), s, masks);
    m.forward(a, one.tokens, exec);
    bits += loss(a.logits, one.targets, exec) / double(windows);
  }
  return bits;
}

struct progress {
  std::vector<std::pair<index, double>> held_out{};  // steps and bits per byte
  double step_seconds = 0, mebibytes = 0;
};

progress train(model& m, const corpus& text, execution& exec, bool quiet = false) {
  const settings& s = m.s;
  activations a(s, s.batch, s.context, true);
  attn::random_numbers random(static_cast<std::uint64_t>(s.seed), 1);
  progress p;
  double bits = 0, time = 0;
  index since = 0;
  for (index step = 1; step <= s.steps; ++step) {
    const double start = seconds();
    examples batch;
    for (index n = 0; n < s.batch; ++n) batch.add(text.train, random.below(std::ssize(text.train) - s.context), s, random);
    m.forward(a, batch.tokens, exec);
    bits += loss(a.logits, batch.targets, exec);
    m.backward(a, batch.tokens, exec);
    m.update(exec);
    time += seconds() - start;
    ++since;
    if (step % std::max<index>(1, s.steps / 20) != 0 && step != s.steps) continue;
    p.held_out.emplace_back(step, held_out_bits(m, text.held, exec));
    p.step_seconds = time / double(step);
    p.mebibytes = double(m.bytes() + a.bytes() + exec.scratch_bytes()) / (1 << 20);
    if (!quiet)
      std::printf("step %5td  %.3f bits per byte, %.3f held out  %6.0f s  %6.0f tokens/s  %5.0f MiB\n", step, bits / double(since),
                  p.held_out.back().second, time, double(s.batch * s.context) / p.step_seconds, p.mebibytes);
    std::fflush(stdout);
    bits = 0, since = 0;
  }
  return p;
}

}  // namespace

int main(int argc, char** argv) try {
  settings s;
  if (argc > 1) s.steps = std::atol(argv[1]);
  if (argc > 2) s.threads = std::atol(argv[2]);
  if (argc > 3) s.batch = std::atol(argv[3]);
  if (argc > 4) s.rate = std::atof(argv[4]);
  if (argc > 5) s.reversible = std::atol(argv[5]);
  const corpus text = split(read_text(s.files), s.context);
  std::printf("%zu + %zu bytes, %.3f bits\n", text.train.size(), text.held.size(), text.frequency_bits);
  const auto list = mixers(s);
  model m(s, mixer_of(list, s.op));
  execution exec(int(s.threads));
  train(m, text, exec);
} catch (const std::exception& error) {
  return std::fprintf(stderr, "%s\n", error.what()), 1;
}
