"""Example 25's module against NumPy: numpy_module.py FOLDER, in which the module lies."""
import sys
import threading
import time

import numpy as np

sys.path.insert(0, sys.argv[1])
import numpy_module as attn  # noqa: E402

print("level", attn.level)
rng = np.random.default_rng(7)


def softmax(q, k, v, causal=False, left=None, right=None):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    i, j = np.indices(s.shape[-2:])
    hidden = (causal & (j > i)) | (False if left is None else (j < i - left) | (j > i + right))
    s = np.where(hidden, -np.inf, s)
    w = np.exp(s - s.max(-1, keepdims=True))
    return w / w.sum(-1, keepdims=True) @ v


def near(found, expected, dtype):
    error = np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected)
    # Law: 2e-6 in float, 1e-13 in double; float16 rounds each number by up to 2^-11
    assert found.dtype == dtype and error < {"e": 5e-4, "f": 2e-6, "d": 1e-13}[np.dtype(dtype).char], (dtype, error)


def refuses(says, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except ValueError as problem:
        assert says in str(problem) and "\n" not in str(problem), problem
    else:
        raise AssertionError(f"expected ValueError: {says}")


for dtype in (np.float16, np.float32, np.float64):
    q, k, v = (rng.standard_normal((2, 3, 50, 16)).astype(dtype) for _ in range(3))
    near(attn.full_softmax(q, k, v), softmax(q, k, v), dtype)
    near(attn.full_softmax(q, k, v, causal=True), softmax(q, k, v, causal=True), dtype)
    near(attn.full_softmax(2 * q, k, v, scale=0.125), softmax(q, k, v), dtype)
    near(attn.sliding_window(q, k, v, left=4, right=2), softmax(q, k, v, left=4, right=2), dtype)
    x, y, z = (a.astype(np.float64) for a in (q, k, v))
    x, y = (np.where(a > 0, a + 1, np.exp(np.minimum(a, 0))) for a in (x, y))
    w = x @ np.swapaxes(y, -1, -2)
    near(attn.linear(q, k, v, eps=0), w @ z / w.sum(-1, keepdims=True), dtype)
    w = np.exp(k.astype(np.float64))
    near(attn.aft_simple(q, k, v, gate=False), np.broadcast_to((w * z).sum(-2, keepdims=True) / w.sum(-2, keepdims=True),
                                                              z.shape), dtype)

    # Where the arrays lie: [batch, length, head, dim], backwards, every other one; a place for the result.
    memory = rng.standard_normal((2, 50, 3, 32)).astype(dtype)
    view = memory.transpose(0, 2, 1, 3)[:, ::-1, ::-1, ::2]
    out = np.zeros((2, 50, 3, 16), dtype).transpose(0, 2, 1, 3)
    assert attn.full_softmax(view, k, view, out=out) is out
    near(out, softmax(view, k, view), dtype)
    near(attn.full_softmax(q[0, 0], k[0, 0], v[0, 0]), softmax(q[0, 0], k[0, 0], v[0, 0]), dtype)

refuses("attn::linear: expected causal, eps; found the option left", attn.linear, q, k, v, left=3)
refuses("attn::full_softmax: expected", attn.full_softmax, q, k[..., :8], v)
refuses("expected arrays of float16, float32 or float64; found int64", attn.full_softmax, q.astype(int), k, v)
refuses("found >f4", attn.full_softmax, q.astype(">f4"), k, v)
refuses("expected arrays of q's type; found float32", attn.full_softmax, q, k.astype(np.float32), v)
refuses("expected 2 to 4 axes", attn.full_softmax, q[0, 0, 0], k, v)
records = np.zeros((50, 16), np.dtype([("a", "f8"), ("b", "i1")]))
refuses("expected aligned elements", attn.full_softmax, records["a"], k[0, 0], v[0, 0])
out.flags.writeable = False
refuses("writeable", attn.full_softmax, q, k, v, out=out)

# Another thread counts while a call runs: it gives way by itself, and no thread is made to.
stop, count = threading.Event(), [0]


def counts():
    while not stop.is_set():
        count[0] += 1
        time.sleep(0.0005)


sys.setswitchinterval(1000)
thread = threading.Thread(target=counts)
thread.start()
long = np.ones((1, 1, 1000, 64))
before = count[0]
attn.full_softmax(long, long, long)
after = count[0]
stop.set()
thread.join()
assert after - before > 2, "the interpreter was locked during a call"
print("right; another thread ran", after - before, "times during a call")
