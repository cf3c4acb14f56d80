#pragma once
// A golden case: a folder with case.txt (`key = value` lines, # starts a comment) and .npy arrays.
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "support/npy.hpp"

namespace testing {

class golden_case {
 public:
  explicit golden_case(const std::filesystem::path& folder) : name_(folder.filename().string()) {
    read_text(folder / "case.txt");
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      if (entry.path().extension() == ".npy") arrays_[entry.path().stem().string()] = entry.path();
  }

  const std::string& name() const { return name_; }
  bool has(const std::string& key) const { return values_.count(key) != 0; }
  bool has_array(const std::string& array) const { return arrays_.count(array) != 0; }

  std::string text(const std::string& key) const {
    if (!has(key)) throw std::runtime_error(name_ + ": case.txt has no " + key);
    return values_.at(key);
  }
  double number(const std::string& key) const { return single<double>(key); }
  idx_t integer(const std::string& key) const { return single<idx_t>(key); }
  bool flag(const std::string& key, bool otherwise) const {
    if (!has(key)) return otherwise;
    if (text(key) != "true" && text(key) != "false")
      throw std::runtime_error(name_ + ": " + key + " is neither true nor false");
    return text(key) == "true";
  }
  std::vector<idx_t> integers(const std::string& key) const {
    return has(key) ? list<idx_t>(key) : std::vector<idx_t>{};
  }

  // An array of at most four extents; missing leading ones are 1.
  tensor<double> array(const std::string& array) const {
    npy_array read = load(array);
    if (read.shape.size() > 4) throw std::runtime_error(name_ + ": " + array + " has more than 4 extents");
    tensor<double> x;
    x.extents = {1, 1, 1, 1};
    std::copy(read.shape.rbegin(), read.shape.rend(), x.extents.rbegin());
    x.data = std::move(read.values);
    return x;
  }
  tensor<double> optional_array(const std::string& name) const {
    return has_array(name) ? array(name) : tensor<double>{};
  }
  // [batch, head, length] or [batch, head, length, channel], by the extents the file has; the first as [.., length, 1].
  tensor<double> optional_rows_or_array(const std::string& name) const {
    if (!has_array(name)) return {};
    return load(name).shape.size() == 3 ? row_array(name) : array(name);
  }
  // lse and its like: [batch, head, length].
  tensor<double> row_array(const std::string& name) const {
    tensor<double> x = array(name);
    x.extents = {x.extents[1], x.extents[2], x.extents[3], 1};
    return x;
  }
  // [batch or 1, keys], as [.., 1, 1, keys].
  tensor<double> key_mask() const {
    tensor<double> x = optional_array("key_mask");
    if (!x.empty()) x.extents = {x.extents[2], 1, 1, x.extents[3]};
    return x;
  }
  std::vector<double> vector(const std::string& name) const {
    return has_array(name) ? load(name).values : std::vector<double>{};
  }

  // What the case has gradients of: x for each array dx, where there is an array x.
  std::set<std::string> gradients() const {
    std::set<std::string> names;
    for (const auto& [array, path] : arrays_)
      if (has_array("d" + array)) names.insert(array);
    return names;
  }

  // What the case holds that is in neither list, gradients (d_out, dq, ...) aside.
  std::set<std::string> unknown(const std::set<std::string>& keys, const std::set<std::string>& arrays) const {
    std::set<std::string> rest;
    for (const auto& [key, value] : values_)
      if (!keys.count(key)) rest.insert("key " + key);
    for (const auto& [array, path] : arrays_) {
      const bool gradient = array.starts_with("d_") || (array.starts_with("d") && arrays.count(array.substr(1)));
      if (!arrays.count(array) && !gradient) rest.insert("array " + array);
    }
    return rest;
  }

 private:
  void read_text(const std::filesystem::path& path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error(path.string() + ": cannot be read");
    for (std::string line; std::getline(file, line);) {
      line = trimmed(line.substr(0, line.find('#')));
      if (line.empty()) continue;
      const auto equals = line.find('=');
      if (equals == std::string::npos) throw std::runtime_error(path.string() + ": no '=' in: " + line);
      const auto [at, added] = values_.emplace(trimmed(line.substr(0, equals)), trimmed(line.substr(equals + 1)));
      if (!added) throw std::runtime_error(path.string() + ": " + at->first + " stands there twice");
    }
  }

  static std::string trimmed(const std::string& text) {
    const auto begin = text.find_first_not_of(" \t\r");
    if (begin == std::string::npos) return {};
    return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
  }

  template <class T>
  std::vector<T> list(const std::string& key) const {
    std::istringstream words(text(key));
    std::vector<T> result;
    for (std::string word; words >> word;) {
      T value{};
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
      if (error != std::errc{} || end != word.data() + word.size())
        throw std::runtime_error(name_ + ": " + key + " holds " + word);
      result.push_back(value);
    }
    return result;
  }

  template <class T>
  T single(const std::string& key) const {
    const std::vector<T> values = list<T>(key);
    if (values.size() != 1) throw std::runtime_error(name_ + ": " + key + " is not one number");
    return values[0];
  }

  npy_array load(const std::string& array) const {
    if (!has_array(array)) throw std::runtime_error(name_ + ": " + array + ".npy is missing");
    return read_npy(arrays_.at(array));
  }

  std::string name_;
  std::map<std::string, std::string> values_;
  std::map<std::string, std::filesystem::path> arrays_;
};

}  // namespace testing
