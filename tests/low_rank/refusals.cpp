// Bad input is refused at the door: std::invalid_argument in one sentence, out and lse untouched.
#include <algorithm>
#include <cmath>
#include <functional>

#include "support/call_low_rank.hpp"
#include "support/catch.hpp"
#include "support/refusal.hpp"

namespace testing {
namespace {

// A good call, to be spoilt in one place: batch 2, heads 4 over 2, lengths 6 and 9, dims 8 and 5, rank 3.
template <class Options>
struct door {
  tensor<float> q{2, 4, 6, 8, 0.5f}, k{2, 2, 9, 8, 0.25f}, v{2, 2, 9, 5, 2}, out{2, 4, 6, 5, 7}, lse{2, 4, 6, 1, 7};
  tensor<float> other{2, 4, 30, 30, 1};  // more memory to point to
  in_view<float> q_view = view(std::as_const(q)), k_view = view(std::as_const(k)), v_view = view(std::as_const(v));
  out_view<float> out_view_ = view(out);
  projection_view<float> e = projection(1, 3, 9), f = projection(4, 3, 9);
  std::vector<index> indices;
  Options options;

  door() = default;
  door(const door&) = delete;
  in_view<float> shaped(index b, index h, index i, index d) const { return {other.data.data(), {b, h, i, d}}; }
  projection_view<float> projection(index h, index r, index j) const { return {other.data.data(), {h, r, j}}; }
  std::span<const index> list(std::vector<index> values) { return indices = std::move(values); }
};
using linformer_door = door<attn::linformer_options<float>>;
using nystrom_door = door<attn::nystrom_options<float>>;

void call(linformer_door& d) {
  attn::execution serial;
  compiled_linformer<float>::call(d.q_view, d.k_view, d.v_view, d.out_view_, d.e, d.f, d.options, serial);
}
void call(nystrom_door& d) {
  attn::execution serial;
  compiled_nystrom<float>::call(d.q_view, d.k_view, d.v_view, d.out_view_, d.options, serial);
}

template <class Door>
struct refused {
  const char* what;
  const char* says;  // the message names what is wrong
  std::function<void(Door&)> spoil;
};

// What both refuse.
template <class Door>
std::vector<refused<Door>> common_refusals() {
  return {
      {"a causal call", "causal", [](auto& d) { d.options.causal = true; }},
      {"a scale of NaN", "scale", [](auto& d) { d.options.scale = std::nanf(""); }},
      {"an infinite scale", "scale", [](auto& d) { d.options.scale = HUGE_VALF; }},
      {"another dim of k", "key dim = query dim 8; found 7", [](auto& d) { d.k_view = d.shaped(2, 2, 9, 7); }},
      {"heads of k that do not divide", "heads",
       [](auto& d) { d.k_view = d.shaped(2, 3, 9, 8), d.v_view = d.shaped(2, 3, 9, 5); }},
      {"another length of out", "length", [](auto& d) { d.out_view_ = d.out_view_.slice(2, 0, 5); }},
      {"a null q", "null",
       [](auto& d) {
         d.q_view = {nullptr, {2, 4, 6, 8}};
       }},
      {"a null out", "null",
       [](auto& d) {
         d.out_view_ = {nullptr, {2, 4, 6, 5}};
       }},
      {"out that is k", "overlap",
       [](auto& d) {
         d.k_view = {d.out.data.data(), {2, 2, 9, 8}, {0, 0, 8, 1}};
       }},
      {"lengths for q and k of different length", "lengths",
       [](auto& d) {
         d.options.lengths = d.list({6, 6});
       }},
      {"a key length beyond the buffer", "key_lengths",
       [](auto& d) {
         d.options.key_lengths = d.list({10, 0});
       }},
      {"too few query lengths", "query_lengths", [](auto& d) { d.options.query_lengths = d.list({6}); }},
  };
}

template <class Door>
void check_refused(const std::string& name, const std::vector<refused<Door>>& list,
                   std::function<void(Door&)> prepare) {
  Door good;
  prepare(good);
  CHECK(refusal([&] { call(good); }) == "");
  for (const auto& bad : list) {
    Door d;
    prepare(d);
    bad.spoil(d);
    INFO(name << " with " << bad.what);
    const std::string message = refusal([&] { call(d); });
    INFO(message);
    CHECK(well_formed(message, name));
    CHECK(message.find(bad.says) != std::string::npos);
    const auto untouched = [](const tensor<float>& x) {
      return std::all_of(x.data.begin(), x.data.end(), [](float value) { return value == 7; });
    };
    CHECK(untouched(d.out));
    CHECK(untouched(d.lse));
  }
}

}  // namespace

TEST_CASE("linformer refuses what does not fit", "[refusals]") {
  using here = linformer_door;
  auto list = common_refusals<here>();
  list.push_back(
      {"a causal call, and why", "every projected key mixes all tokens", [](here& d) { d.options.causal = true; }});
  const auto e = [](index h, index r, index j) { return [=](here& d) { d.e = d.projection(h, r, j); }; };
  const auto f = [](index h, index r, index j) { return [=](here& d) { d.f = d.projection(h, r, j); }; };
  list.push_back({"e of no rank", "rank of e >= 1; found 0", e(1, 0, 9)});
  list.push_back({"f of no rank", "rank of f >= 1; found 0", f(1, 0, 9)});
  list.push_back({"e of a negative rank", "extents", e(1, -2, 9)});
  list.push_back({"ranks that differ", "rank of f = rank of e 3; found 4", f(1, 4, 9)});
  list.push_back({"e of the query length", "expected projection columns = key length 9; found 6", e(1, 3, 6)});
  list.push_back({"f of another length", "projection columns of f = key length 9; found 10", f(1, 3, 10)});
  list.push_back({"e per key head", "heads of e 1 or 4; found 2", e(2, 3, 9)});
  list.push_back({"f of no heads", "heads of f 1 or 4; found 0", f(0, 3, 9)});
  list.push_back({"a null e", "null", [](here& d) { d.e = {nullptr, {1, 3, 9}}; }});
  list.push_back({"no f", "f", [](here& d) { d.f = {}; }});
  list.push_back({"out in e", "overlap", [](here& d) { d.e = {d.out.data.data() + 9, {1, 3, 9}}; }});
  list.push_back({"out in f", "overlap", [](here& d) { d.f = {d.out.data.data(), {1, 3, 9}, {0, 0, 0}}; }});
  list.push_back({"lse in e", "overlap", [](here& d) { d.e = {d.lse.data.data(), {1, 3, 9}, {0, 0, 1}}; }});
  list.push_back({"lse in f", "overlap", [](here& d) { d.f = {d.lse.data.data(), {1, 3, 9}}; }});
  list.push_back({"lse in out", "overlap", [](here& d) { d.options.lse = {d.out.data.data(), {2, 4, 6}}; }});
  list.push_back({"lse of another length", "lse", [](here& d) { d.options.lse = d.options.lse.slice(2, 0, 5); }});
  check_refused<here>("linformer", list, [](here& d) { d.options.lse = row_view(d.lse); });
}

TEST_CASE("nystrom refuses what does not fit", "[refusals]") {
  using here = nystrom_door;
  auto list = common_refusals<here>();
  list.push_back({"a causal call, and why", "both sides of a query", [](here& d) { d.options.causal = true; }});
  list.push_back({"no landmarks", "landmarks >= 1; found 0", [](here& d) { d.options.landmarks = 0; }});
  list.push_back({"negative landmarks", "landmarks >= 1; found -64", [](here& d) { d.options.landmarks = -64; }});
  list.push_back({"negative iterations", "iterations >= 0; found -1", [](here& d) { d.options.iterations = -1; }});
  list.push_back({"a negative cutoff", "cutoff", [](here& d) { d.options.cutoff = -0.1f; }});
  list.push_back({"a cutoff of 1", "cutoff", [](here& d) { d.options.cutoff = 1; }});
  list.push_back({"a cutoff of NaN", "cutoff", [](here& d) { d.options.cutoff = std::nanf(""); }});
  const auto kernel = [](index h, index width) {
    return [=](here& d) { d.options.convolution = {d.other.data.data(), {h, width}}; };
  };
  list.push_back({"a convolution of even width", "odd width; found 4", kernel(4, 4)});
  list.push_back({"a convolution of no width", "odd width; found 0", kernel(4, 0)});
  list.push_back({"a convolution per key head", "heads of convolution = query heads 4; found 2", kernel(2, 3)});
  list.push_back({"one convolution for all heads", "heads of convolution", kernel(1, 3)});
  list.push_back({"a null convolution", "null", [](here& d) { d.options.convolution = {nullptr, {4, 3}}; }});
  list.push_back({"out in the convolution", "overlap", [](here& d) {
                    d.options.convolution = {d.out.data.data(), {4, 3}};
                  }});
  check_refused<here>("nystrom", list, [](here&) {});
}

}  // namespace testing
