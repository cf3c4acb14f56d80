"""ONNX Runtime beside attn: its fused MultiHeadAttention and GroupQueryAttention."""
import os
import sys

sys.dont_write_bytecode = True

try:
    import numpy as np
    import onnxruntime as ort
except ImportError:
    sys.exit("ONNX Runtime is not installed for " + sys.executable)

from cases import QUERIES_PER_KEY_HEAD
from timing import answer, asked

random = np.random.default_rng(1)


def numbers(folder, name, *shape):
    """[heads, length, dim], those that attn_bench saved or normal ones, as [1, length, heads * dim]."""
    if folder:
        x = np.load(f"{folder}/{name}.npy")[:np.prod(shape)].reshape(shape)
    else:
        x = random.standard_normal(shape, dtype=np.float32)
    return np.ascontiguousarray(x.transpose(1, 0, 2).reshape(1, shape[1], -1))


def session(case):
    options = ort.SessionOptions()
    options.intra_op_num_threads = int(os.environ.get("ATTN_PEER_THREADS", "1"))
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(case["model"], options, providers=["CPUExecutionProvider"])


def prepare(case, length, folder=""):
    if not case.get("model"):
        return None
    heads, dim, decodes = case["heads"], case["dim"], "_decode" in case["form"]
    queries = QUERIES_PER_KEY_HEAD * heads if decodes else heads
    new = 1 if decodes else length
    feeds = {"q": numbers(folder, "query", queries, new, dim), "k": numbers(folder, "key", heads, new, dim),
             "v": numbers(folder, "value", heads, new, dim)}
    run = session(case)
    if case["form"] == "full_softmax":
        return lambda: run.run(["o"], feeds)[0]
    # The cache is read and written where it is: its memory is both input and output. Several, as of a model's layers.
    layers = max(1, (256 << 20) // (8 * heads * length * dim)) if decodes and not folder else 1
    caches = [np.zeros((1, heads, length, dim), np.float32) for _ in range(2)]
    if decodes:
        for cache, name in zip(caches, ("key", "value")):
            rows = numbers(folder, name, heads, length - 1, dim).reshape(length - 1, heads, dim)
            cache[0, :, :length - 1] = rows.transpose(1, 0, 2)
    feeds.update(sl=np.array([length - 1], np.int32), tl=np.array(length, np.int32))
    bindings = []
    for _ in range(layers):
        values = [ort.OrtValue.ortvalue_from_numpy(cache) for cache in caches]  # copies
        binding = run.io_binding()
        for name, x in feeds.items():
            binding.bind_cpu_input(name, x)
        for past, present, value in zip(("pk", "pv"), ("nk", "nv"), values):
            binding.bind_ortvalue_input(past, value)
            binding.bind_ortvalue_output(present, value)
        binding.bind_output("o")
        bindings.append((binding, feeds, values))  # what is bound has to stay
    turn = [0]

    def call():
        turn[0] += 1
        binding = bindings[turn[0] % layers][0]
        run.run_with_iobinding(binding)
        return binding.get_outputs()[-1]

    return call


def error_of(case):
    length = case["checked"]
    found = prepare(case, length, case["folder"])()
    found = found if isinstance(found, np.ndarray) else found.numpy()
    found = found.reshape(found.shape[1], -1, case["dim"]).transpose(1, 0, 2).reshape(-1)
    expected = np.load(f"{case['folder']}/{case['form']}_{length}.npy")
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def main():
    answer(asked(f"ONNX Runtime {ort.__version__}"), prepare, error_of)


if __name__ == "__main__":
    main()
