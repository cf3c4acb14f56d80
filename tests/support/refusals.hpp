#pragma once
// What every operator on queries, keys and values refuses on entry: a good call, made wrong in one place at a time.
#include <cmath>

#include "support/refused.hpp"
#include "support/run.hpp"

namespace testing {

// A good call, to be spoilt in one place: batch 2, heads 4 over 2, lengths 6 and (if there are keys apart) 9, dims 8
// and 5.
template <class Options, idx_t Keys = 9>
struct call_inputs {
  tensor<float> q{2, 4, 6, 8, 0.5f}, k{2, 2, Keys, 8, 0.25f}, v{2, 2, Keys, 5, 2}, out{2, 4, 6, 5, 7},
      lse{2, 4, 6, 1, 7};
  in_view<float> q_view = view(std::as_const(q)), k_view = view(std::as_const(k)), v_view = view(std::as_const(v));
  out_view<float> out_view_ = view(out);
  tensor<float> other{2, 4, 30, 30, 1};  // more memory to point to
  std::vector<idx_t> indices;
  std::vector<float> numbers;
  Options options;

  call_inputs() {
    if constexpr (requires { options.lse; }) options.lse = row_view(lse);
  }
  call_inputs(const call_inputs&) = delete;
  std::vector<const tensor<float>*> written() const { return {&out, &lse}; }

  in_view<float> shaped(idx_t b, idx_t h, idx_t i, idx_t d) const { return {other.data.data(), {b, h, i, d}}; }
  std::span<const idx_t> list(std::vector<idx_t> values) { return indices = std::move(values); }
  template <std::same_as<int>... Index>
  std::span<const idx_t> list(Index... values) {
    return list(std::vector<idx_t>{values...});
  }
  std::span<const float> values(std::size_t count) { return numbers.assign(count, 0.5f), numbers; }
};

// What those that have a key_mask refuse.
template <class Call>
std::vector<refused<Call>> key_mask_refusals() {
  const auto mask = [](idx_t b, idx_t j) {
    return [=](Call& d) {
      d.options.key_mask =
          attn::tensor_view<std::uint8_t, 2>(reinterpret_cast<std::uint8_t*>(d.other.data.data()), {b, j});
    };
  };
  return {{"a mask of keys of another batch", "key_mask batch 1 or 2; found 3", mask(3, 9)},
          {"a mask of the queries as keys", "key_mask length = key length 9; found 6", mask(1, 6)},
          {"a mask of no keys", "key_mask length = key length 9; found 0", mask(2, 0)},
          {"a null mask of keys", "null",
           [](Call& d) {
             d.options.key_mask = attn::tensor_view<std::uint8_t, 2>(static_cast<std::uint8_t*>(nullptr), {2, 9});
           }},
          {"out in the mask of keys", "overlap", [](Call& d) {
             d.options.key_mask =
                 attn::tensor_view<std::uint8_t, 2>(reinterpret_cast<std::uint8_t*>(d.out.data.data()), {2, 9});
           }}};
}

// What those refuse whose keys may stand for several tokens.
template <class Call>
std::vector<refused<Call>> span_refusals() {
  const auto with_span = [](idx_t span, auto alter) {
    return [=](Call& d) { d.options.causal = true, d.options.first_position = 0, d.options.span = span, alter(d); };
  };
  const auto nothing = [](Call&) {};
  std::vector<refused<Call>> list = {
      {"a span of 0", "span >= 1; found 0", with_span(0, nothing)},
      {"a negative span", "span >= 1; found -3", with_span(-3, nothing)},
      {"a span without causal", "causal attention, since span is given; found causal = false",
       with_span(2, [](Call& d) { d.options.causal = false; })},
      {"a span without positions", "first_position, since span is given; found none",
       with_span(2, [](Call& d) { d.options.first_position = {}; })},
      {"positions of other items", "first_position, one per batch item: 2; found 3",
       with_span(2, [](Call& d) { d.options.first_position = d.list(0, 1, 2); })},
  };
  if constexpr (requires(Call& d) { d.options.block; })
    list.push_back({"a span and blocks", "a block of 1, since span is given; found 2",
                    with_span(2, [](Call& d) { d.options.block = 2; })});
  const auto by_distance = [&](const char* what, auto alter) {
    list.push_back({what, "no term of the distance, no log_decay and no alibi_slopes, since span is given; found one",
                    with_span(2, alter)});
  };
  by_distance("a span and ALiBi", [](Call& d) { d.options.alibi_slopes = d.values(4); });
  if constexpr (requires(Call& d) { d.options.relative_bias; }) {
    using rows = attn::tensor_view<const float, 3>;
    by_distance("a span and a relative bias", [](Call& d) { d.options.relative_bias = {d.other.data.data(), {4, 9}}; });
    by_distance("a span and relative keys",
                [](Call& d) { d.options.relative_keys = rows(d.other.data.data(), {4, 3, 8}); });
    by_distance("a span and position queries",
                [](Call& d) { d.options.position_queries = rows(d.other.data.data(), {1, 3, 8}); });
    by_distance("a span and log decays", [](Call& d) { d.options.log_decay = rows(d.other.data.data(), {2, 4, 9}); });
  }
  return list;
}

// What all of them refuse.
template <class Call>
std::vector<refused<Call>> common_refusals() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<refused<Call>> list = {
      {"another batch of k", "batch", [](auto& d) { d.k_view = d.shaped(1, 2, 9, 8); }},
      {"another batch of v", "batch", [](auto& d) { d.v_view = d.shaped(3, 2, 9, 5); }},
      {"another batch of out", "batch", [](auto& d) { d.out_view_ = d.out_view_.slice(0, 0, 1); }},
      {"heads of k that do not divide", "heads",
       [](auto& d) { d.k_view = d.shaped(2, 3, 9, 8), d.v_view = d.shaped(2, 3, 9, 5); }},
      {"more heads of k than of q", "heads",
       [](auto& d) { d.k_view = d.shaped(2, 8, 9, 8), d.v_view = d.shaped(2, 8, 9, 5); }},
      {"no heads of k", "heads", [](auto& d) { d.k_view = d.shaped(2, 0, 9, 8), d.v_view = d.shaped(2, 0, 9, 5); }},
      {"other heads of v", "heads", [](auto& d) { d.v_view = d.shaped(2, 4, 9, 5); }},
      {"other heads of out", "heads", [](auto& d) { d.out_view_ = d.out_view_.slice(1, 0, 2); }},
      {"another dim of k", "key dim = query dim 8; found 7", [](auto& d) { d.k_view = d.shaped(2, 2, 9, 7); }},
      {"another length of v", "length", [](auto& d) { d.v_view = d.shaped(2, 2, 8, 5); }},
      {"another length of out", "length", [](auto& d) { d.out_view_ = d.out_view_.slice(2, 0, 5); }},
      {"another dim of out", "dim", [](auto& d) { d.out_view_ = d.out_view_.slice(3, 0, 4); }},
      {"a negative extent", "extent", [](auto& d) { d.k_view = reshaped(d.k, 2, 2, -9, 8); }},
      {"a null q", "null", [](auto& d) { d.q_view = null_view(2, 4, 6, 8); }},
      {"a null k", "null", [](auto& d) { d.k_view = null_view(2, 2, 9, 8); }},
      {"a null v", "null", [](auto& d) { d.v_view = null_view(2, 2, 9, 5); }},
      {"a null out", "null", [](auto& d) { d.out_view_ = null_view(2, 4, 6, 5); }},
      {"out that is q", "overlap", [](auto& d) { d.q_view = reshaped(d.out, 2, 4, 6, 8).strided(0, 0, 0, 1); }},
      {"out that is k", "overlap", [](auto& d) { d.k_view = reshaped(d.out, 2, 2, 9, 8).strided(0, 0, 8, 1); }},
      {"out that is v", "overlap",
       [](auto& d) { d.v_view = reshaped(d.out.data.data() + 100, 2, 2, 9, 5).strided(0, 0, 5, 1); }},
      {"out that meets q at its last number", "overlap",
       [](auto& d) { d.q_view = reshaped(&d.out.data.back(), 2, 4, 6, 8).strided(0, 0, 0, 0); }},
      {"out whose rows are one", "overlap",
       [](auto& d) { d.out_view_ = reshaped(d.out, 2, 4, 6, 5).strided(120, 30, 0, 1); }},
      {"out whose heads interlace wrongly", "overlap",
       [](auto& d) { d.out_view_ = reshaped(d.out, 2, 4, 6, 5).strided(120, 4, 5, 1); }},
      {"lengths for q and k of different length", "lengths", [](auto& d) { d.options.lengths = d.list(6, 6); }},
      {"too few query lengths", "query_lengths", [](auto& d) { d.options.query_lengths = d.list(6); }},
      {"too many key lengths", "key_lengths", [](auto& d) { d.options.key_lengths = d.list(6, 6, 6); }},
      {"a query length beyond the buffer", "query_lengths", [](auto& d) { d.options.query_lengths = d.list(6, 7); }},
      {"a key length beyond the buffer", "key_lengths", [](auto& d) { d.options.key_lengths = d.list(10, 0); }},
      {"a negative query length", "query_lengths", [](auto& d) { d.options.query_lengths = d.list(-1, 6); }},
      {"a negative key length", "key_lengths", [](auto& d) { d.options.key_lengths = d.list(9, -9); }},
      {"lengths beside query lengths", "lengths",
       [](auto& d) { d.options.lengths = d.options.query_lengths = d.list(5, 5); }},
      {"lengths beside key lengths", "lengths",
       [](auto& d) { d.options.lengths = d.options.key_lengths = d.list(5, 5); }},
      {"a scale of NaN", "scale", [nan](auto& d) { d.options.scale = nan; }},
      {"an infinite scale", "scale", [](auto& d) { d.options.scale = HUGE_VALF; }},
      {"a scale that overflows in base 2", "scale", [](auto& d) { d.options.scale = -3e38f; }},
  };
  const auto add = [&list](std::vector<refused<Call>> more) { list.insert(list.end(), more.begin(), more.end()); };
  if constexpr (requires(Call& d) { d.options.lse; })
    add({
        {"a null lse with extents", "null", [](auto& d) { d.options.lse = null_view(2, 4, 6); }},
        {"lse in out", "overlap", [](auto& d) { d.options.lse = reshaped(d.out, 2, 4, 6); }},
        {"lse in q", "overlap", [](auto& d) { d.options.lse = reshaped(d.q, 2, 4, 6); }},
        {"lse in k", "overlap", [](auto& d) { d.options.lse = reshaped(d.k, 2, 4, 6); }},
        {"lse in v", "overlap", [](auto& d) { d.options.lse = reshaped(d.v, 2, 4, 6); }},
        {"lse whose heads are one", "overlap",
         [](auto& d) { d.options.lse = reshaped(d.lse, 2, 4, 6).strided(6, 0, 1); }},
        {"lse of another batch", "lse", [](auto& d) { d.options.lse = d.options.lse.slice(0, 0, 1); }},
        {"lse of other heads", "lse", [](auto& d) { d.options.lse = d.options.lse.slice(1, 0, 2); }},
        {"lse of another length", "lse", [](auto& d) { d.options.lse = d.options.lse.slice(2, 0, 5); }},
    });
  if constexpr (requires(Call& d) { d.options.skip_below; })
    add({{"a negative threshold", "skip_below >= 0; found -1", [](auto& d) { d.options.skip_below = -1; }},
         {"a threshold of NaN", "skip_below >= 0; found nan", [nan](auto& d) { d.options.skip_below = nan; }},
         {"a share of 0", "a finite skip_share > 0; found 0", [](auto& d) { d.options.skip_share = 0; }},
         {"a share of NaN", "a finite skip_share > 0; found nan", [nan](auto& d) { d.options.skip_share = nan; }},
         {"an infinite share", "a finite skip_share > 0; found inf", [](auto& d) { d.options.skip_share = HUGE_VALF; }},
         {"two thresholds", "either skip_below or skip_share; found both",
          [](auto& d) { d.options.skip_below = 7, d.options.skip_share = 1; }},
         {"a count of nothing", "skip_below or skip_share, since skipped is given; found neither",
          [](auto& d) { d.options.skipped = reinterpret_cast<attn::skipped_tiles*>(d.other.data.data()); }}});
  if constexpr (requires(Call& d) { d.options.softcap; })
    add({
        {"a softcap of 0", "softcap", [](auto& d) { d.options.softcap = 0.0f; }},
        {"a negative softcap", "softcap", [](auto& d) { d.options.softcap = -2.0f; }},
        {"a softcap of NaN", "softcap", [nan](auto& d) { d.options.softcap = nan; }},
        {"a softcap whose inverse overflows", "softcap", [](auto& d) { d.options.softcap = 1e-40f; }},
    });
  if constexpr (requires(Call& d) { d.options.span; }) add(span_refusals<Call>());
  if constexpr (requires(Call& d) { d.options.first_position; })
    add({
        {"a position beyond all", "first_position from -2^40 to 2^40; found 1099511627777",
         [](auto& d) { d.options.first_position = (idx_t(1) << 40) + 1; }},
        {"a position before all", "first_position",
         [](auto& d) { d.options.first_position = std::numeric_limits<idx_t>::min(); }},
    });
  if constexpr (requires(Call& d) { d.options.sinks; })
    add({
        {"too few sinks", "sinks", [](auto& d) { d.options.sinks = d.values(2); }},
        {"too many sinks", "sinks", [](auto& d) { d.options.sinks = d.values(8); }},
        {"a sink of NaN", "sinks that are finite",
         [nan](auto& d) { d.options.sinks = d.values(4), d.numbers[2] = nan; }},
        {"an infinite sink", "sinks that are finite, or -infinity for none; found inf",
         [](auto& d) { d.options.sinks = d.values(4), d.numbers[3] = HUGE_VALF; }},
        {"sinks in out", "overlap", [](auto& d) { d.options.sinks = std::span(d.out.data).last(4); }},
        {"sinks in lse", "overlap", [](auto& d) { d.options.sinks = std::span(d.lse.data).last(4); }},
    });
  if constexpr (requires(Call& d) { d.options.alibi_slopes; })
    add({
        {"too few slopes", "alibi_slopes", [](auto& d) { d.options.alibi_slopes = d.values(3); }},
        {"too many slopes", "alibi_slopes", [](auto& d) { d.options.alibi_slopes = d.values(5); }},
        {"a slope of NaN", "alibi_slopes that are finite",
         [nan](auto& d) { d.options.alibi_slopes = d.values(4), d.numbers[0] = nan; }},
        {"an infinite slope", "alibi_slopes that are finite; found -inf",
         [](auto& d) { d.options.alibi_slopes = d.values(4), d.numbers[1] = -HUGE_VALF; }},
        {"slopes in out", "overlap", [](auto& d) { d.options.alibi_slopes = std::span(d.out.data).first(4); }},
        {"slopes in lse", "overlap", [](auto& d) { d.options.alibi_slopes = std::span(d.lse.data).first(4); }},
    });
  return list;
}

// Form::call is the operator, called with the call_inputs or with what stands in it; Form::options what it takes.
template <class Form, idx_t Keys = 9, class Call = call_inputs<typename Form::options, Keys>>
void check_refused(const std::string& name, const std::vector<refused<Call>>& list) {
  using form = Form;
  check_refused(name, list, [](Call& d) {
    attn::execution serial;
    if constexpr (requires { form::call(d, serial); })
      form::call(d, serial);
    else
      form::call(d.q_view, d.k_view, d.v_view, d.out_view_, d.options, {}, serial);
  });
}

}  // namespace testing
