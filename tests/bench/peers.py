#!/usr/bin/python3
"""bench/run --peers without any library: what it says where none is installed, and, with made-up programs in the place
of attn_bench and of a peer, its table, its picture, and that a peer which computes something else is noticed."""
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "peers")]
import onnx_models

try:
    import matplotlib.text
    import plot_peers
except ImportError:
    plot_peers = None

ATTN_BENCH = """
import json, re, sys
flags = dict(a[2:].split("=", 1) for a in sys.argv[1:])
pattern, length = flags["benchmark_filter"], flags["min-length"]
names = re.match(r"\\^\\((.*)\\)/", pattern).group(1).split("|")
rows = [{"name": f"{n}/{length}", "run_type": "iteration", "best_ms": 10.0, "peak_flops": 1e11} for n in names]
context = {"processor": "made up", "compiler": "none", "heads": "8", "dim": flags["dim"], "threads": "1"}
json.dump({"context": context, "benchmarks": rows}, open(flags["benchmark_out"], "w"))
"""
PEER = """
import json, os, sys
if sys.argv[1:] == ["--version"]:
    sys.exit(print("Made up 1.2"))
for case in json.load(sys.stdin):
    if os.environ["ATTN_PEER_THREADS"] != "1" and case["form"] == "linear_causal":
        print(json.dumps({"name": case["key"], "note": os.environ["ATTN_PEER_THREADS"] + " threads"}))
    elif case["form"] == "nystrom":
        print(json.dumps({"name": case["key"], "note": "expected to take 99 s"}))
    elif "aft" not in case["form"]:
        error = {"error": 0.5 if case["form"] == "fnet" else 1e-6} if case["folder"] else {}
        print(json.dumps({"name": case["key"], "ms": 25.0, "runs": 3, **error}))
"""
NONE = ("--python=false", "--node=false")


def run(*arguments):
    command = [sys.executable, str(BENCH / "peers" / "peers.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


class Peers(unittest.TestCase):
    def test_says_what_is_missing_and_how_to_get_it(self):
        no_program = tempfile.NamedTemporaryFile(mode="wb", delete=False)
        self.addCleanup(Path(no_program.name).unlink)
        no_program.write(b"\x7fELF, but no program")
        no_program.close()
        Path(no_program.name).chmod(0o755)
        for arguments in (NONE, ("--check", *NONE), ("--python=/is/not/there", "--node=/is/not/there"),
                          (f"--python={no_program.name}", "--node=false", "--peer=")):
            done = run(*arguments)
            self.assertEqual(done.returncode, 1)
            for part in ("missing: PyTorch", "missing: ONNX Runtime (Python)", "missing: ONNX Runtime (Node.js)",
                         "installs\nnothing itself", "pip install numpy torch", "npm install"):
                self.assertIn(part, done.stderr)
            self.assertNotIn("Traceback", done.stderr)

    def test_run_says_so_before_it_builds(self):
        with tempfile.TemporaryDirectory() as folder:
            command = ["bash", str(BENCH / "run"), "--peers", f"--out={folder}", *NONE]
            done = subprocess.run(command, capture_output=True, text=True)
            self.assertEqual(done.returncode, 1)
            self.assertIn("pip install numpy torch", done.stderr)
            self.assertNotIn("Building", done.stdout)
            done = subprocess.run([*command, "--window=64"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 2)
            self.assertIn("does not take --window=64", done.stderr)

    def test_table_and_picture(self):
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            peer, attn_bench = folder / "peer.py", folder / "attn_bench"
            peer.write_text(PEER)
            attn_bench.write_text(f"#!{sys.executable}\n{ATTN_BENCH}")
            attn_bench.chmod(0o755)
            more = [*NONE, f"--peer={sys.executable} {peer}", "--rounds=2", "--type=float,bfloat16"]
            both = run("--check", *more, f"--peer={sys.executable} -u {peer}")
            self.assertIn(f"found: Made up 1.2, Made up 1.2 ({sys.executable} -u {peer})", both.stderr)
            done = run(str(attn_bench), str(folder / "results"), *more)
            self.assertEqual(done.returncode, 1)  # fnet differs
            self.assertIn("fnet/4096, 8 heads of 64: Made up 1.2 computes something else", done.stderr)
            lines = {line.split(" ")[1]: line for line in done.stdout.splitlines() if line.startswith("| ")}
            self.assertIn("25 (2.5 ×)", lines["linear/4096"])
            self.assertIn("25 (2.5 ×)", lines["full_softmax_bfloat16/4096"])
            self.assertIn("32 over 8 heads of 128", lines["full_softmax_decode/8192"])
            self.assertIn("25 (differs)", lines["fnet/4096"])
            self.assertIn("expected to take 99 s", lines["nystrom/4096"])
            self.assertRegex(lines["aft_full/4096"], r"\| 10 +\| +\|$")  # the peer has no such operator
            self.assertEqual((folder / "results" / "peers.md").read_text(), done.stdout)
            done = run(str(attn_bench), str(folder / "results"), *more, "--only=^linear")
            self.assertEqual(done.returncode, 0, done.stderr)
            results = json.loads((folder / "results" / "peers.json").read_text())
            self.assertIn("Milliseconds, one thread, in turns", done.stdout)
            self.assertEqual({row["form"] for row in results["rows"]}, {"linear", "linear_causal", "linear_backward"})
            many = run(str(attn_bench), str(folder / "results"), *more, "--only=^linear_causal", "--threads=3")
            self.assertIn("Milliseconds, 3 threads, in turns", many.stdout)
            self.assertIn("| 3 threads", many.stdout)
            peer.write_text(PEER.replace("0.5", "None"))  # what Node.js makes of a NaN
            done = run(str(attn_bench), str(folder / "results"), *more, "--only=^fnet")
            self.assertEqual(done.returncode, 1)
            self.assertIn("Made up 1.2 computes something else: its result differs from attn's by nan", done.stderr)
            self.assertNotIn("Traceback", done.stderr)
            done = run(str(attn_bench), str(folder / "results"), *more, "--only=nothing")
            self.assertIn("no operator is called like nothing", done.stderr)
            if plot_peers:
                self.check_picture(results)

    def check_picture(self, results):
        results["rows"][1]["peers"]["Made up 1.2"]["differs"] = True  # has no dot
        figure = plot_peers.draw(results)
        texts = [t.get_text() for t in figure.findobj(matplotlib.text.Text) if t.get_text()]
        for expected in ("attn", "Made up 1.2", "2.5 ×", "linear"):
            self.assertIn(expected, texts)
        self.assertFalse(any("linear_causal" in text for text in texts))
        low, high = figure.axes[0].get_xlim()
        self.assertTrue(low < 10 and 25 < high)
        plot_peers.plt.close(figure)

    def test_models_of_onnx(self):
        """Every message is as long as it says, and what the node is called is where it belongs."""
        def fields(data):
            found, at = {}, 0

            def number():
                nonlocal at
                value = shift = 0
                while True:
                    byte = data[at]
                    at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
                    if byte < 128:
                        return value

            while at < len(data):
                tag = number()
                size = number()
                if tag & 7 == 2:
                    at += size
                    size = data[at - size:at]
                found.setdefault(tag >> 3, []).append(size)
            self.assertEqual(at, len(data))
            return found

        model = fields(onnx_models.grouped(32, 8, 128))
        graph = fields(model[7][0])
        node = fields(graph[1][0])
        self.assertEqual((node[4], node[7]), ([b"GroupQueryAttention"], [b"com.microsoft"]))
        attributes = {a[1][0]: a[3][0] for a in map(fields, node[5])}
        self.assertEqual(attributes, {b"num_heads": 32, b"kv_num_heads": 8, b"local_window_size": (1 << 64) - 1})
        self.assertEqual([fields(x)[1][0] for x in graph[11]], node[1])
        self.assertEqual(len(model[8]), 2)


if __name__ == "__main__":
    unittest.main()
