"""Writes models of one node for ONNX Runtime, without the onnx package: a model is a protocol buffer, and these few
messages of one are shorter than what installing that package takes. Field numbers are those of onnx.proto3."""
from pathlib import Path

FLOAT, INT32 = 1, 6  # TensorProto.DataType
INT = 2  # AttributeProto.AttributeType


def varint(n):
    n &= (1 << 64) - 1
    text = bytearray()
    while n > 127:
        text.append(n & 127 | 128)
        n >>= 7
    return bytes(text) + bytes([n])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def value_info(name, element, shape):
    """A name stands for an axis of any length."""
    dims = b"".join(field(1, field(2 if isinstance(n, str) else 1, n)) for n in shape)
    return field(1, name) + field(2, field(1, field(1, element) + field(2, dims)))


def model(operator, inputs, outputs, attributes):
    node = b"".join(field(1, name) for name, *_ in inputs) + b"".join(field(2, name) for name, *_ in outputs)
    node += field(4, operator) + field(7, "com.microsoft")
    node += b"".join(field(5, field(1, name) + field(3, value) + field(20, INT)) for name, value in attributes.items())
    graph = field(1, node) + field(2, operator)
    graph += b"".join(field(11, value_info(*x)) for x in inputs) + b"".join(field(12, value_info(*x)) for x in outputs)
    versions = field(8, field(1, "") + field(2, 17)) + field(8, field(1, "com.microsoft") + field(2, 1))
    return field(1, 8) + field(7, graph) + versions  # IR version 8


def attention(heads, dim):
    """Every query sees every key."""
    row = [1, "n", heads * dim]
    return model("MultiHeadAttention", [(x, FLOAT, row) for x in "qkv"], [("o", FLOAT, row)], {"num_heads": heads})


def grouped(heads, kv_heads, dim, window=-1):
    """Causal, over a cache (pk, pv) of which sl + 1 tokens are seen, new ones among them; window: keys of a query."""
    cache = [1, kv_heads, "p", dim]
    inputs = [("q", FLOAT, [1, "n", heads * dim]), *[(x, FLOAT, [1, "n", kv_heads * dim]) for x in "kv"],
              ("pk", FLOAT, cache), ("pv", FLOAT, cache), ("sl", INT32, [1]), ("tl", INT32, [])]
    outputs = [("o", FLOAT, [1, "n", heads * dim]), *[(x, FLOAT, [1, kv_heads, "t", dim]) for x in ("nk", "nv")]]
    return model("GroupQueryAttention", inputs, outputs,
                 {"num_heads": heads, "kv_num_heads": kv_heads, "local_window_size": window})


def write(path, case, queries_per_key_head, window):
    """The model of a case; False where ONNX Runtime has no operator for it."""
    form, heads, dim = case["form"], case["heads"], case["dim"]
    if case["element"] != "float":
        return False
    if form == "full_softmax":
        data = attention(heads, dim)
    elif form == "full_softmax_causal":
        data = grouped(heads, heads, dim)
    elif form == "sliding_window_causal":
        data = grouped(heads, heads, dim, window + 1)
    elif form == "full_softmax_decode":
        data = grouped(queries_per_key_head * heads, heads, dim)
    else:
        return False
    Path(path).write_bytes(data)
    return True
