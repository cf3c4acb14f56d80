#!/usr/bin/python3
"""Draws all pictures of attn_bench from made-up results in which rows are missing, and checks what they say: no axis,
dot or area may compare one length with another, and what was not run is named. Looks at matplotlib's objects, not at
pixels."""
import json
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
try:
    import matplotlib.text
except ImportError:
    print("skipped: matplotlib is missing")
    sys.exit(0)
import plot
import plot_error
from plot_common import plt

FULL, WINDOW, LINEAR, OTHER = "full_softmax", "sliding_window", "linear", "nystrom"
CONTEXT = {"heads": "8", "dim": "64", "threads": "1", "processor": "made up", "compiler": "none", "type": "float",
           "error_data": "first, second", "error_tokens": "1024",
           "families": f"exact: {FULL}=#111111 {WINDOW}=#222222; low rank: {OTHER}=#333333; kernels: {LINEAR}=#444444"}
MAIN = (256, 1024, 4096, 16384)


def row(name, length, ms, setting="", runs=5, **more):
    full = f"{name}/{setting + '/' if setting else ''}{length}"
    return {"name": full, "run_type": "iteration", "best_ms": ms, "scratch_bytes": 1024.0 * length, "runs": runs,
            "peak_flops": 1e11, **more}


def errors(value):
    return {"rel_error": value, "rel_error_1": value / 2, "mean_error": 0.6, "mean_error_1": 0.3}


def results(missing=(), single=()):
    """Every form of four operators; without the (name, length) in `missing`."""
    rows = []
    for name, error, ms in ((FULL, 3e-7, lambda n: (n / 1024) ** 2 * 10), (WINDOW, 0.8, lambda n: n / 300),
                            (OTHER, 0.3, lambda n: n / 500), (LINEAR, None, lambda n: n / 1000)):
        for n in MAIN:
            more = errors(error) if error else {}
            for form, factor in (("", 1), ("_causal", 0.6), ("_backward", 3)):
                rows.append(row(name + form, n, factor * ms(n), **(more if form != "_backward" else {})))
            rows.append(row(f"{name}_decode", n, ms(n) / 100, of_bandwidth=0.5))
    rows.append(row(WINDOW, 4096, 4, "window:32", **errors(0.9)))
    rows.append(row(WINDOW, 4096, 40, "window:512", **errors(0.5)))
    for r in rows:
        if any(r["name"] == f"{name}/{n}" for name, n in single):
            r["runs"] = 1
    return [r for r in rows if not any(r["name"].split("/")[0] == name and r["name"].endswith(f"/{n}")
                                       for name, n in missing)]


def draw(rows, **context):
    """Every picture by name: its figure, still open."""
    figures = {}
    saved = plot.save, plot_error.save
    plot.save = plot_error.save = lambda figure, folder, name: figures.update({name: figure})
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "results.json"
            path.write_text(json.dumps({"context": {**CONTEXT, **context}, "benchmarks": rows}))
            sys.argv = ["plot.py", str(path), folder]
            plot.main()
    finally:
        plot.save, plot_error.save = saved
    return figures


def words(figure):
    return [t.get_text() for t in figure.findobj(matplotlib.text.Text) if t.get_text()]


def said(figure, part):
    return any(part in text for text in words(figure))


def grey_areas(figure):
    """Where each begins, in the figure's milliseconds."""
    return [min(p.get_xy()[:, 0]) for axes in figure.axes for p in axes.patches if hasattr(p, "get_xy")]


def dots(figure):
    return {round(float(x), 6) for axes in figure.axes for line in axes.lines if line.get_marker() == "o"
            for x in line.get_xdata()}


class Pictures(unittest.TestCase):
    def tearDown(self):
        plt.close("all")

    def test_whole(self):
        figures = draw(results())
        self.assertEqual(set(figures), {"time", "memory", "error", "error_causal", "backward", "decode"})
        for name in ("error", "error_causal"):
            self.assertTrue(said(figures[name], "time at 4K tokens"))
            self.assertTrue(said(figures[name], "grey: slower than full softmax at 4K tokens"))
        self.assertEqual(grey_areas(figures["error"]), [160.0] * 4)
        self.assertEqual(grey_areas(figures["error_causal"]), [96.0] * 4)
        for name in ("time", "backward"):
            self.assertIn("time at 4K tokens", words(figures[name]))
        self.assertIn("scratch at 4K tokens", words(figures["memory"]))
        for figure in figures.values():
            self.assertFalse(said(figure, "not run"))
            self.assertFalse(said(figure, "a single run"))
            self.assertFalse(said(figure, "no figure"))

    def test_axes(self):
        figures = draw(results())
        for name in ("time", "memory", "backward"):
            self.assertTrue(said(figures[name], "length (tokens)"))
        self.assertTrue(said(figures["decode"], "tokens in the cache"))
        ticks = [t.get_text() for t in figures["time"].axes[0].get_xticklabels()]
        self.assertEqual((ticks[0], ticks[-1]), ("256", "16K"))

    def test_families_and_colours_are_those_of_the_results(self):
        figure = draw(results())["time"]
        self.assertEqual([axes.get_title(loc="left") for axes in figure.axes[:3]], ["exact", "low rank", "kernels"])
        names = {t.get_text(): t.get_color() for t in figure.axes[0].texts}
        self.assertEqual((names[FULL], names[WINDOW]), ("#111111", "#222222"))

    def test_full_softmax_ends_early(self):
        """As on slow machines once: nothing may be compared with its time at another length."""
        gone = [(FULL, 4096), (FULL, 16384)]
        figures = draw(results(gone), not_run_time="full_softmax 4096 16384")
        error = figures["error"]
        self.assertTrue(said(error, "time at 4K tokens"))
        self.assertEqual(grey_areas(error), [])
        self.assertTrue(said(error, "full softmax at 4K tokens was not run"))
        self.assertFalse(said(error, "grey"))
        self.assertTrue(said(error, "no time at 4K tokens, so not in this picture: full_softmax"))
        self.assertNotIn(10.0, dots(error))  # its time at 1024
        time = figures["time"]
        self.assertIn("bidirectional: no figure at 4K tokens", words(time))
        self.assertTrue(said(time, "not run, no time left, at 4K and 16K tokens: full_softmax"))
        self.assertEqual(grey_areas(figures["error_causal"]), [96.0] * 4)

    def test_an_operator_ends_early(self):
        figures = draw(results([(OTHER, 4096), (f"{OTHER}_causal", 4096)]))
        self.assertTrue(said(figures["error"], f"no time at 4K tokens, so not in this picture: {OTHER}"))
        self.assertNotIn(round(16384 / 500, 6), dots(figures["error"]))
        self.assertIn("no figure at 4K tokens", words(figures["time"]))

    def test_short_runs_only(self):
        """--max-length=1024: everything is compared there, and says so."""
        figures = draw([r for r in results() if int(r["name"].split("/")[-1]) <= 1024])
        for name in ("error", "error_causal"):
            self.assertTrue(said(figures[name], "time at 1K tokens"))
            self.assertFalse(said(figures[name], "4K"))
        self.assertIn("time at 1K tokens", words(figures["time"]))
        self.assertEqual(grey_areas(figures["error"]), [10.0] * 4)

    def test_what_was_not_run_is_named_where_it_belongs(self):
        figures = draw(results(), not_run_time="linear 65536, linear_causal 65536, linear_backward 65536, linear_decode 65536",
                       not_run_memory="nystrom 1048576",
                       not_run_max_seconds="sliding_window/window:32 4096, multipole/exact:32,clusters:16,probe:96 4096")
        self.assertTrue(said(figures["time"], "not run, no time left, at 64K tokens: linear, linear_causal"))
        self.assertTrue(said(figures["time"], "not run, too little memory, at 1M tokens: nystrom"))
        self.assertTrue(said(figures["backward"], "at 64K tokens: linear_backward"))
        self.assertFalse(said(figures["backward"], "nystrom 1"))
        self.assertFalse(said(figures["time"], "clusters"))  # a setting, though its name has commas
        self.assertTrue(said(figures["decode"], "at 64K tokens: linear_decode"))

    def test_data_of_ones_own(self):
        """Errors on 300 tokens stand beside times at 300; settings that see all of these are left out and named."""
        others = [r for r in results() if "_error" in " ".join(r) and "causal" not in r["name"]]
        rows = others + [row(name, 300, 7, **errors(error)) for name, error in
                         ((FULL, 3e-7), (WINDOW, 3e-7), (OTHER, 0.3))]
        for r in rows:
            if r["name"] == f"{WINDOW}/300":
                r.update(sees_every_token=1.0, label="window=300")
        own = {"error_tokens": "300", "own_data": "true", "comparison_length": "300"}
        figure = draw(rows, **own)["error"]
        self.assertTrue(said(figure, "time at 300 tokens"))
        self.assertTrue(said(figure, "left out, as they see every one of the data's 300 tokens: sliding_window (window=300)"))
        self.assertNotIn(WINDOW, [t.get_text() for axes in figure.axes for t in axes.texts])
        self.assertIn(OTHER, [t.get_text() for axes in figure.axes for t in axes.texts])
        asked_for = draw(others, **{**own, "comparison_length": "4096"})["error"]
        self.assertTrue(said(asked_for, "time at 4K tokens (the data has 300)"))

    def test_settings_slower_than_full_softmax(self):
        """They are named, not drawn, but for the setting of the other pictures."""
        rows = [r for r in results() if r["name"] != f"{OTHER}/4096"] + [
            row(OTHER, 4096, 170, **errors(0.3)), row(OTHER, 4096, 200, "landmarks:512", label="512", **errors(0.2)),
            row(FULL, 4096, 300, "dropout:10", label="dropout=10", **errors(3e-7))]
        figure = draw(rows)["error"]
        self.assertTrue(said(figure, f"left out, as they take longer than full softmax: {OTHER} (512)"))
        self.assertFalse(said(figure, "dropout"))
        self.assertIn(170.0, dots(figure))
        self.assertTrue({200.0, 300.0}.isdisjoint(dots(figure)))

    def test_decoding_is_of_one_sequence_and_told_apart(self):
        """A step of 16 sequences counts as 16; no two curves of a panel look alike, and no name leaves its panel."""
        rows = [row(f"{FULL}_decode", n, n / 1024, of_bandwidth=0.5) for n in MAIN]
        rows += [row("of_sixteen_decode", n, n / 64, of_bandwidth=0.5, sequences=16.0) for n in MAIN[:2]]
        rows += [row(f"another{i}_decode", n, 1e-3, of_bandwidth=0.01) for n in MAIN for i in range(12)]
        figure = draw(rows)["decode"]
        self.assertTrue(said(figure, "time of one token of one sequence"))
        self.assertTrue(said(figure, "of_sixteen, of 16"))
        times, shares = figure.axes[:2]
        curves = [line for line in times.lines if line.get_transform() == times.transData]
        self.assertEqual(list(curves[-2].get_ydata()), [0.25, 1.0])
        looks = {(line.get_marker(), line.get_linestyle(), str(line._dash_pattern)) for line in curves}
        self.assertEqual(len(looks), len(curves))
        figure.canvas.draw()
        for axes in (times, shares):
            box = axes.get_window_extent()
            for text in axes.texts:
                if text.get_text():
                    extent = text.get_window_extent()
                    self.assertGreaterEqual(extent.x0, box.x1)
                    self.assertGreaterEqual(extent.y0, box.y0)
                    self.assertLessEqual(extent.x1, shares.get_window_extent().x0 if axes is times else figure.bbox.x1)

    def test_operators_of_a_family_have_markers(self):
        figure = draw([r for r in results() if "_" not in r["name"].replace(FULL, "").replace(WINDOW, "")])["time"]
        markers = {line.get_marker() for line in figure.axes[0].lines if line.get_color() in ("#111111", "#222222")}
        self.assertEqual(len(markers - {"x"}), 2)  # which is a single run

    def test_a_single_run_is_marked(self):
        figure = draw(results(single=[(FULL, 16384)]))["time"]
        self.assertTrue(said(figure, "×: a single run"))
        marked = [tuple(line.get_xdata()) for line in figure.axes[0].lines if line.get_marker() == "x"]
        self.assertIn((16384,), marked)

    def test_one_row_alone(self):
        figures = draw([row(FULL, 1024, 10, **errors(3e-7))])
        self.assertTrue(said(figures["error"], "time at 1K tokens"))
        self.assertIn("time at 1K tokens", words(figures["time"]))

    def test_nothing(self):
        self.assertEqual(draw([]), {})


if __name__ == "__main__":
    unittest.main()
