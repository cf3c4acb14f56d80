"""What the pictures of attn_bench share: colours, the results, how numbers and titles are written."""
import json
import math
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

COLOURS, FAMILIES = {}, {}  # operator -> colour, title of a panel -> its operators: both from the results
SPARE = ["#d08080", "#7f7f7f", "#a3a300", "#c05780", "#3d7a7a", "#9a6324"]
INK, FAINT = "#333333", "#c9c9c9"
COMPARED = [4096]  # the length at which pictures compare, from the results

plt.rcParams.update({
    "font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "axes.labelcolor": INK,
    "axes.edgecolor": "#888888", "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#ececec", "grid.linewidth": 0.8, "axes.axisbelow": True,
    "figure.facecolor": "white", "savefig.facecolor": "white",
})


def colour(name):
    if name not in COLOURS:
        COLOURS[name] = SPARE[sum(map(ord, name)) % len(SPARE)]
    return COLOURS[name]


class Curve:
    """One operator, causal or not, or its decoding: figures by length, each the best of its repetitions."""

    def __init__(self, name):
        self.name = name
        self.decode = name.endswith("_decode")
        self.causal = name.endswith("_causal")
        self.backward = "_backward" in name
        self.operator = name.removesuffix("_decode").removesuffix("_causal").removesuffix("_backward")
        self.colour = colour(self.operator)
        self.dashes = (0, (4, 2)) if self.causal else "solid"
        self.at = {}  # length -> row
        self.settings = {}  # (setting, length) -> row, of settings besides the run's own
        self.runs = {}  # length -> how often it was run

    def add(self, length, row, setting=""):
        rows, key = (self.settings, (setting, length)) if setting else (self.at, length)
        if key not in rows or row["best_ms"] < rows[key]["best_ms"]:
            rows[key] = row
        if not setting:
            self.runs[length] = self.runs.get(length, 0) + row.get("runs", row.get("iterations", 1))

    def line(self, key, factor=1.0):
        lengths = sorted(self.at)
        return lengths, [self.at[n][key] * factor for n in lengths]

    def trade(self, length):
        """The rows of all settings at this length, fastest first."""
        others = [row for (_, at), row in self.settings.items() if at == length]
        return sorted([self.at[length], *others], key=lambda row: row["best_ms"])

    def last(self, key):
        return self.at[max(self.at)][key]


def common_length(curves):
    """The one length at which a picture compares: 4096, of data of one's own its length, or else the longest of those
    that most curves have."""
    lengths = [n for c in curves for n in c.at]
    return COMPARED[0] if COMPARED[0] in lengths else max(set(lengths), key=lambda n: (lengths.count(n), n))


def names_of(text):
    """"linear 65536 262144, fnet 1048576" -> {"linear": [65536, 262144], "fnet": [1048576]}"""
    entries = [entry.split() for entry in text.split(", ") if entry.strip()]  # a setting may have commas
    return {name: [int(n) for n in lengths] for name, *lengths in entries}


def read(path):
    results = json.loads(Path(path).read_text())
    context = results["context"]
    COMPARED[0] = int(context.get("comparison_length", 4096))
    for family in filter(None, context.get("families", "").split("; ")):
        family_title, members = family.split(": ")
        pairs = [member.split("=") for member in members.split()]
        FAMILIES[family_title] = [name for name, _ in pairs]
        COLOURS.update(pairs)
    curves = {}
    for row in results["benchmarks"]:
        if row.get("run_type") == "iteration" and "best_ms" in row:
            name, *rest = row["name"].split("/")  # operator/length or operator/setting/length
            setting = rest.pop(0) if ":" in rest[0] else ""
            curves.setdefault(name, Curve(name)).add(int(rest[0]), row, setting)
            if "peak_flops" in row:  # the median of all measurements so far: the last is that of the whole run
                context["peak_gflops"] = f"{row['peak_flops'] * 1e-9:.4g}"
    return context, [c for c in curves.values() if c.at]


# --- what was not run --------------------------------------------------------------------------------------------------
REASONS = {"not_run_time": "not run, no time left", "not_run_max_seconds": "not run, beyond --max-seconds",
           "not_run_memory": "not run, too little memory"}


def not_run(context, wanted, width):
    """Lines that name what was not run of the forms wanted(curve) is true of: by lengths, for each reason."""
    lines = []
    for key, reason in REASONS.items():
        by_lengths = {}
        for name, lengths in names_of(context.get(key, "")).items():
            if "/" not in name and wanted(Curve(name)):
                by_lengths.setdefault(tuple(lengths), []).append(name)
        for lengths, names in by_lengths.items():
            line = f"{reason}, at {' and '.join(map(tokens, lengths))} tokens: {', '.join(names)}"
            lines += textwrap.wrap(line, width, subsequent_indent="    ")
    return lines


def write_not_run(figure, lines):
    """At the bottom, 0.15 inches a line."""
    for n, line in enumerate(reversed(lines)):
        figure.text(0.012, (0.06 + 0.15 * n) / figure.get_figheight(), line, fontsize=7.5, color="#777777", va="bottom")


# --- how numbers are written ------------------------------------------------------------------------------------------
def short(value, units):
    for limit, size, unit in units:
        if value < limit:
            break
    figure = value / size
    return f"{figure:.2g} {unit}" if figure < 10 else f"{figure:.0f} {unit}"


def seconds(ms):
    return short(ms, [(1, 1e-3, "µs"), (1e3, 1, "ms"), (math.inf, 1e3, "s")])


def memory(size):
    return short(size, [(2**10, 1, "B"), (2**20, 2**10, "KiB"), (2**30, 2**20, "MiB"), (math.inf, 2**30, "GiB")])


def tokens(n):
    n = int(n)
    return str(n) if n % 1024 else f"{n >> 10}K" if n % (1 << 20) else f"{n >> 20}M"


def length_axis(axes, curves, label):
    lengths = sorted({n for c in curves for n in c.at})
    low, high = lengths[0], lengths[-1]
    first = next((n for n in lengths if n & (n - 1) == 0), low)  # the length of data of one's own may be any
    step = 1 if high < low << 8 else 2
    ticks = [first << i for i in range(0, 40, step) if first << i <= high]
    axes.set_xscale("log", base=2)
    axes.set_xlim(low / 1.25, high * 1.25)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter([tokens(t) for t in ticks]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def value_axis(axis, written, base=10):
    axis.set_major_locator(LogLocator(base=base, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda v, _: written(v)))
    axis.set_minor_formatter(NullFormatter())


def title(figure, text, context):
    threads = context.get("threads", "1")
    heads, dim, element = context.get("heads"), context.get("dim"), context.get("type", "float")
    kind = "virtual thread" if "virtual_threads" in context else "thread"
    shape = f"{heads} heads of {dim}, {threads} {kind}{'s' * (threads != '1')}, {element}"
    where = f"{context.get('processor')}, {context.get('compiler')}: {context.get('peak_gflops')} Gflop/s per core"
    inch = 1 / figure.get_figheight()
    figure.text(0.012, 1 - 0.15 * inch, text, fontsize=14, fontweight="bold", va="top", color="#111111")
    figure.text(0.012, 1 - 0.47 * inch, f"{shape}  ·  {where}", fontsize=9, va="top", color="#666666")


def remark(figure, text):
    figure.text(0.985, 1 - 0.47 / figure.get_figheight(), text, fontsize=9, va="top", ha="right", color="#666666")


def save(figure, folder, name):
    for kind in ("png", "svg"):
        figure.savefig(folder / f"{name}.{kind}", dpi=160)
    plt.close(figure)
