// Tensors of an ONNX file and the nodes that use them: of its protocol buffers, the fields that weights need.
//
//   const support::onnx_file model("model.onnx");
//   model.tensor("conv1.bias").numbers                          // floats and whole numbers of any size, as float
//   model.node_of("/layers.0/fc1/MatMul_output_0").inputs[1]    // exporters invent names; the node tells them
//
// The graphs within a graph, the branches of an If node, belong to it. Throws std::runtime_error, which names the file,
// the tensor and what is wrong with it.
#pragma once

#include "arrays.hpp"

#include <memory>

namespace support {

struct onnx_node {
  std::string type;
  std::vector<std::string> inputs, outputs;
};

namespace detail {

/// The fields of a message, one after another.
class onnx_fields {
 public:
  std::uint64_t number = 0, value = 0;  // of a field: which one it is, and what it is, where it is a number
  std::string_view bytes;               // or the bytes of a string, a list or another message

  onnx_fields(const std::string& path, std::string_view message) : path_(path), rest_(message) {}

  bool next() {
    if (rest_.empty()) return false;
    const std::uint64_t key = varint();
    number = key >> 3, value = 0, bytes = {};
    switch (key & 7) {
      case 0: value = varint(); break;
      case 1: bytes = take(8); break;
      case 2: bytes = take(varint()); break;
      case 5: bytes = take(4); break;
      default: fail(path_, "expected an ONNX file");
    }
    list_ = (key & 7) == 2;
    return true;
  }
  /// Whole numbers come one in a field, or many.
  void add_integers(std::vector<std::ptrdiff_t>& to) const {
    if (!list_) return to.push_back(static_cast<std::ptrdiff_t>(value));
    for (onnx_fields list(path_, bytes); !list.rest_.empty();)
      to.push_back(static_cast<std::ptrdiff_t>(list.varint()));
  }

 private:
  std::uint64_t varint() {
    std::uint64_t x = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      x |= std::uint64_t{byte & 127u} << shift;
      if (byte < 128) return x;
    }
    fail(path_, "expected an ONNX file");
  }
  std::string_view take(std::uint64_t count) {
    if (count > rest_.size()) fail(path_, "expected an ONNX file; one of its messages ends too early");
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }

  const std::string& path_;
  std::string_view rest_;
  bool list_ = false;
};

}  // namespace detail

class onnx_file {
 public:
  explicit onnx_file(const std::string& path) : path_(path), file_(std::make_shared<std::string>(read_file(path))) {
    bool found = false;
    for (fields model(path_, *file_); model.next();)
      if (model.number == 7) add_graph(model.bytes, 0), found = true;
    if (!found) fail(path_, "expected an ONNX file; found no graph in it");
  }

  const std::string& path() const { return path_; }
  /// The file as it is, for a checksum.
  const std::string& bytes() const { return *file_; }
  bool has(const std::string& name) const { return tensors_.contains(name); }

  array tensor(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) fail(path_, "expected the tensor " + name + "; found none");
    const std::string where = path_ + ": " + name;
    const stored& x = found->second;
    if (!x.integers.empty() && x.type != 10 && x.type != 16) {  // of 16-bit floats they would be the bits
      if (count_of(where, x.shape) != x.integers.size())
        fail(where, "expected numbers for the shape " + text_of(x.shape) + "; found " +
                        std::to_string(x.integers.size()));
      return {x.shape, {x.integers.begin(), x.integers.end()}};
    }
    switch (x.type) {
      case 1: return array_of<float>(where, x.shape, x.bytes);
      case 2: return array_of<std::uint8_t>(where, x.shape, x.bytes);
      case 3: return array_of<std::int8_t>(where, x.shape, x.bytes);
      case 6: return array_of<std::int32_t>(where, x.shape, x.bytes);
      case 7: return array_of<std::int64_t>(where, x.shape, x.bytes);
      case 10: return array_of<Eigen::half>(where, x.shape, x.bytes);
      case 11: return array_of<double>(where, x.shape, x.bytes);
      case 16: return array_of<Eigen::bfloat16>(where, x.shape, x.bytes);
      default: fail(where, "expected floats or whole numbers; found ONNX's type " + std::to_string(x.type));
    }
  }
  /// The node that writes a tensor.
  const onnx_node& node_of(const std::string& output) const {
    const auto found = writers_.find(output);
    if (found == writers_.end()) fail(path_, "expected a node that writes the tensor " + output + "; found none");
    return nodes_[found->second];
  }

 private:
  using fields = detail::onnx_fields;
  struct stored {
    std::uint64_t type = 0;
    std::vector<std::ptrdiff_t> shape, integers;
    std::string_view bytes;
  };

  void add_graph(std::string_view message, int depth) {
    if (depth > 8) fail(path_, "expected an ONNX file; found graphs within graphs");
    for (fields graph(path_, message); graph.next();) {
      if (graph.number == 1) add_node(graph.bytes, depth);
      if (graph.number == 5) add_tensor(graph.bytes);
    }
  }
  void add_node(std::string_view message, int depth) {
    onnx_node node;
    for (fields x(path_, message); x.next();) {
      if (x.number == 1) node.inputs.emplace_back(x.bytes);
      if (x.number == 2) node.outputs.emplace_back(x.bytes);
      if (x.number == 4) node.type = x.bytes;
      if (x.number != 5) continue;
      for (fields attribute(path_, x.bytes); attribute.next();)
        if (attribute.number == 6) add_graph(attribute.bytes, depth + 1);
    }
    for (const std::string& output : node.outputs) writers_[output] = nodes_.size();
    nodes_.push_back(std::move(node));
  }
  void add_tensor(std::string_view message) {
    stored tensor;
    std::string name;
    for (fields x(path_, message); x.next();) {
      if (x.number == 1) x.add_integers(tensor.shape);
      if (x.number == 2) tensor.type = x.value;
      if (x.number == 4 || x.number == 9 || x.number == 10) tensor.bytes = x.bytes;
      if (x.number == 5 || x.number == 7) x.add_integers(tensor.integers);
      if (x.number == 8) name = x.bytes;
    }
    tensors_[name] = std::move(tensor);
  }

  std::string path_;
  std::shared_ptr<const std::string> file_;
  std::map<std::string, stored> tensors_;
  std::map<std::string, std::size_t> writers_;
  std::vector<onnx_node> nodes_;
};

}  // namespace support
