// What multi_head_latent, its step and its backward pass refuse (refusals.hpp): what is computed or cached stays as it
// was.
#include "layers/refusals.hpp"
#include "support/call_multi_head_latent.hpp"

namespace testing::latent_refusals_tests {

using namespace layer_refusals;

// A valid call, of which a test makes one argument invalid: 4 heads of 3 + 2 and values of 4, latents of 5; of
// x [2, 6, 8]. Gradients have memory of their own.
struct latents {
  attn::multi_head_latent_weights<float> w;
  attn::multi_head_latent_options<float> options{.heads = 4};
  attn::multi_head_latent_gradients<float> g;
  std::vector<idx_t> lengths{};
  tensor<float> written{1, 1, 40, 40, 7};

  explicit latents(const arguments& d)
      : w{.query_down = d.matrix(6, 8), .q_norm = d.vector(6), .query_up = d.matrix(20, 6), .latent = d.matrix(7, 8),
          .latent_norm = d.vector(5), .latent_up = d.matrix(28, 5), .output = d.matrix(8, 16)} {
    options.rotary = attn::rotary_options<float>{.interleaved = true};
    g.x = {written.data.data(), {2, 6, 8}};
  }
};

struct wrong {
  const char* what;
  const char* says;
  std::function<void(latents&, arguments&)> change;
};

const std::vector<wrong> of_weights = {
    {"no query", "a query weight, or query_down and query_up; found none",
     [](latents& l, arguments&) { l.w.query_down = {}; }},
    {"both kinds of queries", "either a query weight, or query_down, q_norm and query_up; found both",
     [](latents& l, arguments& d) { l.w.query = d.matrix(20, 8); }},
    {"no query_up", "query_up weight [outputs, inputs] with columns = dim of its input 6; found none",
     [](latents& l, arguments&) { l.w.query_up = {}; }},
    {"columns of query_up", "query_up weight [outputs, inputs] with columns = dim of its input 6; found [20, 5]",
     [](latents& l, arguments& d) { l.w.query_up = d.matrix(20, 5); }},
    {"q_norm of another size", "q_norm, one per row of query_down: 6; found 5",
     [](latents& l, arguments& d) { l.w.q_norm = d.vector(5); }},
    {"queries that heads do not divide", "query_up weight rows divisible by heads 4; found 22",
     [](latents& l, arguments& d) { l.w.query_up = d.matrix(22, 6); }},
    {"columns of latent", "latent weight [outputs, inputs] with columns = dim of its input 8; found [7, 9]",
     [](latents& l, arguments& d) { l.w.latent = d.matrix(7, 9); }},
    {"no latent_up", "a latent_up weight [heads (D + Dv), r]; found none",
     [](latents& l, arguments&) { l.w.latent_up = {}; }},
    {"latents smaller than latent_up's", "latent weight rows >= columns of latent_up 8; found 7",
     [](latents& l, arguments& d) { l.w.latent_up = d.matrix(28, 8), l.w.latent_norm = d.vector(8); }},
    {"queries smaller than the shared dims", "columns of latent_up, 24; found 20",
     [](latents& l, arguments& d) { l.w.latent = d.matrix(11, 8); }},
    {"latent_up without room for keys", "latent_up weight rows >= heads x dims of a query beside the shared ones 12",
     [](latents& l, arguments& d) { l.w.latent_up = d.matrix(8, 5); }},
    {"latent_up that heads do not divide", "latent_up weight rows divisible by heads 4; found 27",
     [](latents& l, arguments& d) { l.w.latent_up = d.matrix(27, 5); }},
    {"latent_norm of all rows", "latent_norm, one per column of latent_up: 5; found 7",
     [](latents& l, arguments& d) { l.w.latent_norm = d.vector(7); }},
    {"columns of output", "output weight [outputs, inputs] with columns = dim of its input 16; found [8, 15]",
     [](latents& l, arguments& d) { l.w.output = d.matrix(8, 15); }},
    {"no heads", "heads >= 1; found 0", [](latents& l, arguments&) { l.options.heads = 0; }},
    {"a negative eps", "norm_eps >= 0; found -1", [](latents& l, arguments&) { l.options.norm_eps = -1; }},
    {"more rotated dims than are shared", "an even number of dims up to 2; found 4",
     [](latents& l, arguments&) { l.options.rotary->dims = 4; }},
    {"another number of frequencies", "frequencies = dims / 2 = 1; found 2",
     [](latents& l, arguments&) {
       static const std::vector<double> two = {1, 2};
       l.options.rotary->frequencies = two;
     }},
};

void check(const std::string& name, const std::function<void(latents&, arguments&)>& call, std::vector<wrong> more) {
  more.insert(more.end(), of_weights.begin(), of_weights.end());
  for (const wrong& bad : more) {
    INFO(name << ": " << bad.what);
    arguments d;
    latents l(d);
    bad.change(l, d);
    const tensor<float> out = d.out, rest = d.rest, written = l.written;
    const std::string message = refusal([&] { call(l, d); });
    INFO(message);
    CHECK((well_formed(message, name) || well_formed(message, "latent_attention") ||
           well_formed(message, "latent_attention_step")));
    CHECK(message.find(bad.says) != std::string::npos);
    CHECK(d.out == out);
    CHECK(d.rest == rest);
    CHECK(l.written == written);
  }
}

TEST_CASE("multi_head_latent refuses what does not fit", "[layer_refusals]") {
  const auto call = [](latents& l, arguments& d) {
    compiled_multi_head_latent<float>::call(d.x_view, d.out_view_, l.w, l.options, d.serial);
  };
  arguments good;
  latents l(good);
  call(l, good);
  CHECK(good.out(0, 0, 0, 0) != 7);
  check("multi_head_latent", call,
        {
            {"another dim of out", "out dim = output weight rows 8; found 6",
             [](latents&, arguments& d) { d.out_view_ = d.out_view_.slice(2, 0, 6); }},
            {"x that is out", "separate", [](latents&, arguments& d) { d.x_view = d.out_view_; }},
            {"latent_up within out", "separate",
             [](latents& w, arguments& d) { w.w.latent_up = in_matrix<float>(d.out.data.data(), {28, 5}, {1, 1}); }},
            {"attended without an output weight", "attended with an output weight",
             [](latents& w, arguments& d) {
               w.w.output = {}, w.options.attended = d.remainder;
               d.out_view_ = {d.out.data.data(), {2, 3, 16}};
               d.x_view = d.x_view.slice(1, 0, 3);
               w.options.attended = {d.rest.data.data(), {2, 3, 16}};
             }},
            {"attended of another dim", "attended dim 16; found 8",
             [](latents& w, arguments& d) { w.options.attended = d.remainder; }},
            {"lengths of another batch", "lengths",
             [](latents& w, arguments&) {
               static const std::vector<idx_t> three = {1, 2, 3};
               w.options.attention.lengths = three;
             }},
            {"a log-sum of another shape", "lse",
             [](latents& w, arguments& d) { w.options.attention.lse = {d.rest.data.data(), {2, 4, 5}}; }},
            {"a log-sum within out", "separate",
             [](latents& w, arguments& d) { w.options.attention.lse = {d.out.data.data(), {2, 4, 6}}; }},
        });
}

TEST_CASE("multi_head_latent_step refuses what does not fit", "[layer_refusals]") {
  idx_t batch = 2, dim = 7, value_dim = 5;
  bool values_in_keys = true;
  const auto call = [&](latents& l, arguments& d) {
    attn::kv_cache<float> cache({.batch = batch, .dim = dim, .value_dim = value_dim},
                                {.values_in_keys = values_in_keys});
    attn::multi_head_latent_step_options<float> options{
        .heads = l.options.heads, .norm_eps = l.options.norm_eps, .rotary = l.options.rotary};
    options.attention.lengths = l.lengths;
    batch = 2, dim = 7, value_dim = 5, values_in_keys = true;
    compiled_multi_head_latent<float>::step(cache, d.x_view, d.out_view_, l.w, options, d.serial);
  };
  arguments good;
  latents l(good);
  call(l, good);
  CHECK(good.out(0, 0, 0, 0) != 7);
  check("multi_head_latent_step", call,
        {
            {"a cache of another batch", "x batch = cache batch 3; found 2", [&](latents&, arguments&) { batch = 3; }},
            {"a cache of other rows", "8", [&](latents&, arguments&) { dim = 8; }},
            {"a cache of other latents", "4", [&](latents&, arguments&) { value_dim = 4; }},
            {"a cache with values of its own", "values", [&](latents&, arguments&) { values_in_keys = false; }},
            {"more tokens than come", "lengths", [](latents& w, arguments&) { w.lengths = {7, 1}; }},
            {"lengths of another batch", "lengths", [](latents& w, arguments&) { w.lengths = {1}; }},
            {"another dim of out", "out dim = output weight rows 8; found 6",
             [](latents&, arguments& d) { d.out_view_ = d.out_view_.slice(2, 0, 6); }},
            {"a position that is too far", "a first position from",
             [](latents& w, arguments&) { w.options.rotary->first_position = idx_t(1) << 60; }},
        });
}

// With attended, which leaves the options of attention to the backward pass, and the gradient that it writes first.
void attended_of_batch_3(latents& w) {
  static const std::vector<idx_t> three = {1, 2, 3};
  static tensor<float> attended(2, 1, 6, 16, 1);
  w.options.attention.lengths = three, w.options.attended = sequence(attended);
  w.g.output = {w.written.data.data() + 200, {8, 16}};
}

TEST_CASE("multi_head_latent_backward refuses what does not fit", "[layer_backward_refusals]") {
  const auto call = [](latents& l, arguments& d) {
    compiled_multi_head_latent<float>::backward(d.x_view, l.w, d.out_view_, l.g, l.options, d.serial);
  };
  arguments good;
  latents l(good);
  call(l, good);
  CHECK(l.written(0, 0, 0, 0) != 7);
  check("multi_head_latent_backward", call,
        {
            {"another dim of d_out", "d_out dim = output weight rows 8; found 6",
             [](latents&, arguments& d) { d.out_view_ = d.out_view_.slice(2, 0, 6); }},
            {"a gradient of another shape", "the gradient of x of the shape of x [2, 6, 8]; found [2, 5, 8]",
             [](latents& w, arguments&) { w.g.x = w.g.x.slice(1, 0, 5); }},
            {"a gradient of no query", "query weight, since its gradient is asked for; found none",
             [](latents& w, arguments&) { w.g.query = {w.written.data.data() + 200, {20, 8}}; }},
            {"a gradient of no norm", "latent_norm, since its gradient is asked for; found none",
             [](latents& w, arguments&) {
               w.w.latent_norm = {}, w.g.latent_norm = {w.written.data.data() + 200, {5}};
             }},
            {"one gradient for both", "separate",
             [](latents& w, arguments&) { w.g.latent_up = {w.written.data.data(), {28, 5}}; }},
            {"a gradient within the log-sums", "separate",
             [](latents& w, arguments&) { w.options.attention.lse = {w.written.data.data(), {2, 4, 6}}; }},
            {"a gradient that is d_out", "separate", [](latents& w, arguments& d) { w.g.x = d.out_view_; }},
            {"attended of another length", "attended length = x length 6; found 3",
             [](latents& w, arguments& d) { w.options.attended = {d.rest.data.data(), {2, 3, 16}}; }},
            {"lengths of another batch", "lengths", [](latents& w, arguments&) { attended_of_batch_3(w); }},
            {"lengths of another batch, the output's gradient alone", "lengths",
             [](latents& w, arguments&) { attended_of_batch_3(w), w.g.x = {}; }},
        });
}

}  // namespace testing::latent_refusals_tests
