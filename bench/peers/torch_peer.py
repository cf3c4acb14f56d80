"""PyTorch beside attn: scaled_dot_product_attention where it has an operator, straightforward tensor code elsewhere."""
import os
import sys

sys.dont_write_bytecode = True

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    sys.exit("PyTorch is not installed for " + sys.executable)
if not hasattr(F, "scaled_dot_product_attention"):
    sys.exit(f"PyTorch {torch.__version__} has no scaled_dot_product_attention: 2.0 or later is needed")

from cases import QUERIES_PER_KEY_HEAD
from timing import answer, asked, best_of

WINDOW, RANK, LANDMARKS, FEATURES, ITERATIONS, CHUNK = 128, 256, 64, 256, 6, 64  # as attn_bench has them
UNIT_NORM_EPS, SOLVED = 1e-6, 32  # of the delta rule; its chunks: those of 64 tokens take 1.2 times as long
MEMORY = 256 << 20  # bytes of the caches that are read in turn, as those of a model's layers are


# --- operators of q, k, v [heads, length, dim] and parameters ---------------------------------------------------------
def full_softmax(q, k, v, p):
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


def full_softmax_causal(q, k, v, p):
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def windowed(q, k, v, p):
    """Blocks of queries over the keys they can see, of which a mask hides those outside the window."""
    heads, n, dim = q.shape
    block, before, after = p["block"], p["before"], p["after"]
    blocks, seen = n // block, before + block + after

    def ranges(x):
        padded = F.pad(x, (0, 0, before, after))
        return padded.unfold(1, seen, block).permute(1, 0, 3, 2)  # [blocks, heads, seen, dim]

    out = F.scaled_dot_product_attention(q.view(heads, blocks, block, dim).transpose(0, 1), ranges(k), ranges(v),
                                         attn_mask=p["mask"])
    return out.transpose(0, 1).reshape(heads, n, dim)


def compiled_window(n, before, after):
    """The same by flex_attention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    seen = create_block_mask(lambda b, h, i, j: (i - j <= before) & (j - i <= after), None, None, n, n, device="cpu")
    attention = torch.compile(flex_attention)
    return lambda q, k, v, p: attention(q[None], k[None], v[None], block_mask=seen)[0]


# Before PyTorch 2.7, flex_attention is not tried: 2.6 takes 80 times as long as blocks, besides 20 s of compiling.
COMPILES = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 7)
IS_FASTER = {}  # whether the compiled one is, by what a query sees


def window_of(q, k, v, p):
    """The faster one, at the first length that is asked for; without a C++ compiler, blocks."""
    sees = p["before"], p["after"]
    try:
        if COMPILES and IS_FASTER.get(sees, True):
            compiled = compiled_window(q.shape[1], *sees)
            compiled(q, k, v, p)
            if sees not in IS_FASTER:
                IS_FASTER[sees] = (best_of(lambda: compiled(q, k, v, p), 0.1) <
                                   best_of(lambda: windowed(q, k, v, p), 0.1))
            if IS_FASTER[sees]:
                return compiled
    except Exception:  # no compiler, or one that fails
        IS_FASTER[sees] = False
    return windowed


def linformer(q, k, v, p):
    return full_softmax(q, p["e"] @ k, p["f"] @ v, p)


def nystrom(q, k, v, p):
    heads, n, dim = q.shape
    landmarks = min(LANDMARKS, n)
    q = q * dim ** -0.5
    q_means, k_means = (x.view(heads, landmarks, n // landmarks, dim).mean(2) for x in (q, k))
    a = torch.softmax(q_means @ k_means.mT, -1)
    z = a.mT / (a.sum(1).amax(1) * a.sum(2).amax(1))[:, None, None]
    eye = torch.eye(landmarks, dtype=a.dtype)
    for _ in range(ITERATIONS):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    over_keys = F.scaled_dot_product_attention(q_means[None], k[None], v[None], scale=1.0)[0]
    return torch.softmax(q @ k_means.mT, -1) @ (z @ over_keys)


def kernel_sums(q, k, v, eps):
    return (q @ (k.mT @ v)) / (q @ k.sum(1)[:, :, None] + eps)


def linear(q, k, v, p):
    return kernel_sums(F.elu(q) + 1, F.elu(k) + 1, v, 1e-6)


def linear_causal(q, k, v, p):
    heads, n, dim = q.shape
    q, k, v = (x.view(heads, n // CHUNK, CHUNK, dim) for x in (F.elu(q) + 1, F.elu(k) + 1, v))
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)  # the last column sums the features: the denominator
    sums = k.mT @ v
    out = q @ (sums.cumsum(1) - sums) + (q @ k.mT).tril() @ v
    return (out[..., :-1] / (out[..., -1:] + 1e-6)).reshape(heads, n, dim)


def delta_rule(q, k, v, p):
    """In chunks. Within one, where e_t is the decay since its beginning and S the state there, what token t writes is
    u_t = beta_t (v_t - e_t S^T k_t - sum over s < t of (e_t / e_s) (k_s . k_t) u_s): a triangular system, solved for
    all chunks at once, of the values and of what S is multiplied by."""
    heads, n, dim = q.shape
    q, k = (x * (x.square().sum(-1, keepdim=True) + UNIT_NORM_EPS).rsqrt() for x in (q, k))
    q, k, v, beta, log_decay = (x.unflatten(1, (n // SOLVED, SOLVED))
                                for x in (q * dim ** -0.5, k, v, p["beta"], p["log_decay"]))
    log_decay = log_decay.cumsum(2)
    decay, between = log_decay.exp(), (log_decay - log_decay.mT).tril().exp()
    system = (beta * k @ k.mT).mul_(between)  # the solver takes ones for its diagonal, and nothing above it
    right = torch.cat([beta * v, beta * decay * k], -1)
    solved = torch.linalg.solve_triangular(system.mT, right.mT, upper=True, left=False, unitriangular=True).mT
    writes, of_state = solved.split([v.shape[-1], dim], -1)
    scores = (q @ k.mT).mul_(between).tril_()
    kept = ((log_decay[:, :, -1:] - log_decay).exp() * k).mT
    state, out = torch.zeros(heads, dim, v.shape[-1], dtype=q.dtype), []
    for q_c, scores_c, writes_c, of_state_c, kept_c, decay_c in zip(
            *(x.unbind(1) for x in (q * decay, scores, writes, of_state, kept, decay[:, :, -1:]))):
        u = torch.baddbmm(writes_c, of_state_c, state, alpha=-1)
        out.append(torch.baddbmm(q_c @ state, scores_c, u))
        state = torch.baddbmm(decay_c * state, kept_c, u)
    return torch.cat(out, 1)


def performer(q, k, v, p):
    root = q.shape[-1] ** -0.25  # of the scale
    w = p["features"]

    def exponents(x):
        return (x * root) @ w.T - (x * root).square().sum(-1, keepdim=True) / 2

    q, k = exponents(q), exponents(k)
    return kernel_sums((q - q.amax(2, keepdim=True)).exp(), (k - k.amax((1, 2), keepdim=True)).exp(), v, 0)


def fnet(q, k, v, p):
    """On the memory of q, as one matrix of all channels."""
    return torch.fft.fft2(q.reshape(q.shape[1], -1)).real


def aft_simple(q, k, v, p):
    return torch.sigmoid(q) * (torch.softmax(k, 1) * v).sum(1, keepdim=True)


def aft_full(q, k, v, p):
    """One product for all heads, numerators beside denominators."""
    heads, n, dim = q.shape
    w = (p["bias"] - p["bias"].amax(1, keepdim=True)).exp()
    k = (k - k.amax(1, keepdim=True)).exp()
    sums = w @ torch.cat([k * v, k], -1).transpose(0, 1).reshape(n, -1)
    sums = sums.view(n, heads, 2 * dim).transpose(0, 1)
    return torch.sigmoid(q) * sums[..., :dim] / sums[..., dim:]


OPERATORS = {f.__name__: f for f in (full_softmax, full_softmax_causal, linformer, nystrom, linear, linear_causal,
                                     delta_rule, performer, fnet, aft_simple, aft_full)}
OPERATORS.update(sliding_window=windowed, sliding_window_causal=windowed)


# --- what they are given ----------------------------------------------------------------------------------------------
def read(folder, name):
    data = bytearray(open(f"{folder}/{name}.npy", "rb").read())
    return torch.frombuffer(data, dtype=torch.float32, offset=10 + data[8] + 256 * data[9])


class Numbers:
    """Those that attn_bench saved, or normal ones."""

    def __init__(self, case, folder):
        self.type, self.folder = getattr(torch, case["element"]), folder

    def __call__(self, name, *shape):
        if self.folder:
            numbers = read(self.folder, name)[:torch.Size(shape).numel()].view(shape)
        else:
            numbers = self.drawn(name, shape)
        return numbers.to(self.type)

    @staticmethod
    def drawn(name, shape):
        if name in ("rate", "log_decay"):
            return torch.rand(shape) * (1 if name == "rate" else -0.1)
        return torch.randn(shape) / (shape[-2] ** 0.5 if name.startswith("projection") else 1)


def mask_of(length, block, before, after):
    """[blocks, 1, block, keys]: the keys of a block of queries that are there and within the window."""
    query = torch.arange(length).view(-1, 1, block, 1)
    keys = before + block + after
    key = (torch.arange(0, length, block)[:, None] + torch.arange(-before, block + after)).view(-1, 1, 1, keys)
    return (key >= 0) & (key < length) & (key >= query - before) & (key <= query + after)


def parameters(case, length, numbers):
    form, dim = case["form"], case["dim"]
    if "linformer" in form:
        return {"e": numbers("projection_e", RANK, length), "f": numbers("projection_f", RANK, length)}
    if "performer" in form:
        return {"features": numbers("features", FEATURES, dim)}
    if "aft_full" in form:
        return {"bias": numbers("bias", length, length)}
    if "delta_rule" in form:
        return {"beta": numbers("rate", case["heads"], length, 1),
                "log_decay": numbers("log_decay", case["heads"], length, 1)}
    if "sliding_window" in form:
        block, after = 32, 0 if "causal" in form else WINDOW
        return {"block": block, "before": WINDOW, "after": after, "mask": mask_of(length, block, WINDOW, after)}
    return {}


def decode(case, length, numbers):
    """One more token for a cache that lies in memory: queries of a key head are rows of one small product."""
    heads, dim = case["heads"], case["dim"]
    last = [numbers(name, heads, 1, dim) for name in ("key", "value")]
    first = [numbers(name, heads, length - 1, dim) for name in ("key", "value")]
    layers = 1 if numbers.folder else max(1, MEMORY // (2 * 4 * heads * length * dim))
    caches = [[torch.cat(pair, 1) for pair in zip(first, last)] for _ in range(layers)]
    q = numbers("query", QUERIES_PER_KEY_HEAD * heads, 1, dim).view(heads, QUERIES_PER_KEY_HEAD, dim)
    turn = [0]

    def call():
        turn[0] += 1
        cache = caches[turn[0] % layers]
        for rows, token in zip(cache, last):
            rows[:, -1:] = token
        return full_softmax(q, *cache, {})

    return call


def prepare(case, length, folder=""):
    form, numbers = case["form"], Numbers(case, folder)
    if "_decode" in form:
        return decode(case, length, numbers)
    operator = OPERATORS.get(form.replace("_backward", ""))
    if operator is None:
        return None
    shape = case["heads"], length, case["dim"]
    q, k, v = (numbers(name, *shape) for name in ("query", "key", "value"))
    p = parameters(case, length, numbers)
    if operator is windowed:
        operator = window_of(q, k, v, p)
    if "_backward" not in form:
        return lambda: operator(q, k, v, p)
    inputs = [x.requires_grad_() for x in (q, k, v, *(p.values() if "aft_full" in form else ()))]  # attn: also of w
    d_out = numbers("gradient", *shape)
    with torch.enable_grad():
        out = operator(q, k, v, p)
    return lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True, allow_unused=True)


def error_of(case):
    """Against attn, at a shorter length."""
    folder, length = case["folder"], case["checked"]
    found = prepare(case, length, folder)()
    parts = zip(("_q", "_k", "_v"), found) if "_backward" in case["form"] else [("", found)]
    worst = 0.0
    for part, result in parts:
        expected = read(folder, f"{case['form']}_{length}{part}")
        if result is None:  # a gradient that is zero, or is not there
            result = torch.zeros_like(expected)
        result = result.detach().float().reshape(-1)
        worst = max(worst, ((result - expected).norm() / expected.norm().clamp_min(1e-30)).item())
    return worst


def version():
    """With what multiplies its matrices: builds differ more by that than by their age."""
    blas = next((name for key, name in (("BLAS_INFO=mkl", "MKL"), ("BLAS_INFO=open", "OpenBLAS"))
                 if key in torch.__config__.show()), "")
    return f"PyTorch {torch.__version__.split('+')[0]}" + (f" {blas}" if blas else "")


def main():
    cases = asked(version())
    torch.set_num_threads(int(os.environ.get("ATTN_PEER_THREADS", "1")))
    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    answer(cases, prepare, error_of)


if __name__ == "__main__":
    main()
