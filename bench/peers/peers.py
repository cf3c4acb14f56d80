"""attn beside other libraries, in turns: peers.py ATTN_BENCH FOLDER [flags]; bench/run --peers starts it.

Flags: --python=PROGRAM (default $PYTHON or python3), --node=PROGRAM (default node), --peer=PROGRAM (one more peer, as
cases.py describes; may be given several times), --type=float,bfloat16, --threads=1 (of each), --rounds=3,
--seconds=0.3 (of a case in a round), --max-seconds=15 (cases of which one run takes longer are left out), --only=REGEX
(of names), --check (only says what is installed).
"""
import datetime
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # the folder of the sources stays as it is
here = Path(__file__).resolve().parent
sys.path.insert(0, str(here))

import onnx_models
from cases import BFLOAT16, CHECKED, FLOAT, QUERIES_PER_KEY_HEAD, shape_of, threads_of, times_as_long

WINDOW = 128
TOLERANCE = {"float": 1e-4, "bfloat16": 3e-2}  # of results, relative to the norm
NOTHING = """\
There is nothing to compare with: bench/run --peers measures what is installed of PyTorch and ONNX Runtime, and installs
nothing itself. One of the commands above gets one of them. A folder of their own is enough for both:
  python3 -m venv .build/peers && .build/peers/bin/pip install numpy torch onnxruntime
  bench/run --peers --python=.build/peers/bin/python3"""
FROM = {  # how to get it
    "PyTorch": "pip install numpy torch, or, Debian 13: apt-get install python3-torch; --python= names another Python",
    "ONNX Runtime (Python)": "pip install onnxruntime; --python= names another Python",
    "ONNX Runtime (Node.js)": "npm install --prefix .build/peers --ignore-scripts onnxruntime-node, then "
                              "NODE_PATH=.build/peers/node_modules bench/run --peers"}


def environment(threads=1):
    """So many threads, and OpenBLAS free to choose its kernels."""
    given = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    return {**given, "ATTN_PEER_THREADS": str(threads),
            **{f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "OPENBLAS", "MKL")}}


def value_of(arguments, name, otherwise):
    values = [a.partition("=")[2] for a in arguments if a.startswith(f"--{name}=")]
    return values[-1] if values else otherwise


def candidates(arguments):
    """(label, command) of every program that might be there."""
    python = shlex.split(value_of(arguments, "python", os.environ.get("PYTHON", "python3")))
    node = shlex.split(value_of(arguments, "node", "node"))
    own = [shlex.split(a.partition("=")[2]) for a in arguments if a.startswith("--peer=")]
    return [("PyTorch", [*python, str(here / "torch_peer.py")]),
            ("ONNX Runtime (Python)", [*python, str(here / "onnx_peer.py")]),
            ("ONNX Runtime (Node.js)", [*node, str(here / "onnx_peer.js")]), *((c[0], c) for c in own if c)]


def installed(arguments):
    """{version: command}, and what is missing, in words."""
    found, missing = {}, []
    for label, command in candidates(arguments):
        reason = f"there is no {command[0]}"
        if shutil.which(command[0]):
            try:
                answer = subprocess.run([*command, "--version"], capture_output=True, text=True, env=environment())
            except OSError as error:  # of another processor, or no program at all
                answer = subprocess.CompletedProcess(command, 1, "", str(error))
            if answer.returncode == 0 and answer.stdout.strip():
                version = answer.stdout.strip().splitlines()[-1]
                if version in found:
                    version += " (Node.js)" if "Node.js" in label else f" ({shlex.join(command)})"
                found[version] = command
                continue
            reason = (answer.stderr.strip().splitlines() or ["it gives no version"])[-1]
        missing.append(f"{label}: {reason}" + (f"\n  {FROM[label]}" if label in FROM else ""))
    return found, missing


def pin(threads):
    """This process, and with it all that it starts, to the last processors that it may use, one for each thread."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-threads:])


# --- attn -------------------------------------------------------------------------------------------------------------
def of_dims(cases):
    """Cases by the dims and lengths that attn_bench is called with."""
    groups = {}
    for case in cases:
        groups.setdefault((case["dim"], case["length"]), []).append(case)
    return groups.items()


def attn_bench(program, json_path, cases, dim, length, budget, more=()):
    names = "|".join(case["name"].rsplit("/", 1)[0] for case in cases)
    types = ",".join(dict.fromkeys(case["element"] for case in cases))
    command = [program, f"--benchmark_out={json_path}", f"--benchmark_filter=^({names})/{length}$", f"--dim={dim}",
               f"--type={types}", f"--min-length={length}", f"--max-length={length}", f"--budget={budget:.0f}",
               "--efficiency=false", *more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"peers.py: {shlex.join(command)} failed:\n{done.stderr}")
    return json.loads(Path(json_path).read_text())


def measure_attn(program, folder, cases, seconds, threads):
    """{key: ms}, and what attn_bench says of the machine."""
    times, context = {}, {}
    for (dim, length), group in of_dims(cases):
        # First each once, then as many visits as it has time for, up to five.
        results = attn_bench(program, folder / "attn.json", group, dim, length, 10 + 3 * seconds * len(group),
                             [f"--threads={threads}"])
        context = {**results["context"], **{"peak_gflops": context.get("peak_gflops")}}
        for row in results["benchmarks"]:
            if row.get("run_type") == "iteration" and "best_ms" in row:
                key = f"{row['name']} D{dim}"
                times[key] = min(times.get(key, math.inf), row["best_ms"])
                if row.get("peak_flops"):
                    context["peak_gflops"] = f"{row['peak_flops'] * 1e-9:.4g}"
    return times, context


def save_results(program, folder, cases):
    """What attn computes at a shorter length, for the peers to compare with: a folder for each dim."""
    for dim in {case["dim"] for case in cases}:
        group = [{**case, "element": "float", "name": f"{case['form']}/{CHECKED}"}
                 for case in cases if case["dim"] == dim]
        attn_bench(program, folder / "attn.json", group, dim, CHECKED, 8, [f"--save={folder / f'dim_{dim}'}"])


# --- peers ------------------------------------------------------------------------------------------------------------
def tasks(cases, folder, first, seconds, most_seconds):
    """What a peer is asked in a round; in the first one it also compares results."""
    asked = []
    for n, case in enumerate(cases):
        task = {**case, "seconds": seconds, "most_seconds": most_seconds, "checked": CHECKED,
                "queries_per_key_head": QUERIES_PER_KEY_HEAD,
                "linear": not re.match("full_softmax(?!_decode)|aft_full", case["form"]),
                "folder": str(folder / f"dim_{case['dim']}") if first else ""}
        model = folder / f"{n}.onnx"
        if onnx_models.write(model, case, QUERIES_PER_KEY_HEAD, WINDOW):
            task["model"] = str(model)
        asked.append(task)
    return asked


def measure_peer(command, asked, threads):
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, env=environment(threads))
    if done.returncode != 0:
        say(f"{shlex.join(command)} failed ({done.returncode}):", *done.stderr.strip().splitlines()[-3:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def measure(program, folder, peers, cases, rounds, seconds, most_seconds, threads):
    """One row for each case: attn's time and what is known of each peer."""
    attn, times, facts, context = {}, {}, {}, {}
    say("comparing with attn's results, at", CHECKED, "tokens")
    save_results(program, folder, cases)
    for turn in range(rounds):
        say(f"round {turn + 1} of {rounds}: attn")
        found, context = measure_attn(program, folder, cases, seconds, threads)
        for key, ms in found.items():
            attn.setdefault(key, []).append(ms)
        for version, command in peers.items():
            say(f"round {turn + 1} of {rounds}: {version}")
            # What was too slow in the first round is not asked again.
            wanted = [c for c in cases if "note" not in facts.get((c["key"], version), {})]
            for line in measure_peer(command, tasks(wanted, folder, turn == 0, seconds, most_seconds), threads):
                at = line["name"], version
                facts.setdefault(at, {}).update({k: line[k] for k in ("error", "note") if k in line})
                if "ms" in line:
                    times.setdefault(at, []).append(line["ms"])
    rows = []
    for case in cases:
        if case["key"] not in attn:
            say(f"attn_bench had no time for {case['name']}: give more by --seconds")
            continue
        row = {**case, "shape": shape_of(case), "attn_ms": statistics.median(attn[case["key"]]), "peers": {}}
        for version in peers:
            at = case["key"], version
            if at in times or at in facts:
                row["peers"][version] = dict(facts.get(at, {}))
                if at in times:
                    row["peers"][version]["ms"] = statistics.median(times[at])
                    row["peers"][version]["differs"] = is_other(row, row["peers"][version])
        rows.append(row)
    return rows, context


# --- what is written --------------------------------------------------------------------------------------------------
def shown(ms):
    return f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}"


def error_of(peer):
    error = peer.get("error", 0)
    return math.nan if error is None else error  # JavaScript writes a NaN as null


def is_other(row, peer):
    """Whether the peer computed something else; a NaN is."""
    return not error_of(peer) <= TOLERANCE[row["element"]]


def cell(row, version):
    peer = row["peers"].get(version, {})
    if "ms" not in peer:
        return peer.get("note", "")
    ratio = "differs" if is_other(row, peer) else times_as_long(peer["ms"] / row["attn_ms"])
    return f"{shown(peer['ms'])} ({ratio})"


def table(rows, versions):
    """In Markdown: it is read as it is, and can be copied."""
    lines = [["operator/tokens", "", "attn", *versions]]
    lines += [[row["name"], row["shape"], shown(row["attn_ms"]), *(cell(row, v) for v in versions)] for row in rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    written = ["| " + " | ".join(text.ljust(width) for text, width in zip(line, widths)) + " |" for line in lines]
    return "\n".join([written[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *written[1:]])


def commit():
    done = subprocess.run(["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


def say(*words):
    print(*words, file=sys.stderr, flush=True)


def main():
    arguments = sys.argv[1:]
    peers, missing = installed(arguments)
    if not peers or "--checked" not in arguments:  # bench/run has said so before building
        for line in missing:
            say("missing:", line)
    if not peers:
        say("\n" + NOTHING)
        sys.exit(1)
    say("found:", ", ".join(peers))
    if "--check" in arguments:
        return
    paths = [a for a in arguments if not a.startswith("--")]
    if len(paths) != 2:
        sys.exit(__doc__)
    program, folder = paths[0], Path(paths[1]).resolve()
    work = folder / "peers"
    work.mkdir(parents=True, exist_ok=True)
    types = value_of(arguments, "type", "float").split(",")
    only = re.compile(value_of(arguments, "only", ""))
    cases = [case for case in FLOAT + BFLOAT16 * ("bfloat16" in types) if only.search(case["key"])]
    if not cases:
        sys.exit(f"peers.py: no operator is called like {only.pattern} (--only)")
    rounds = int(value_of(arguments, "rounds", "3"))
    threads = int(value_of(arguments, "threads", "1"))
    pin(threads)
    rows, context = measure(program, work, peers, cases, rounds, float(value_of(arguments, "seconds", "0.3")),
                            float(value_of(arguments, "max-seconds", "15")), threads)
    shutil.rmtree(work)
    context.update(threads=str(threads), date=datetime.date.today().isoformat(), commit=commit(), rounds=str(rounds))
    (folder / "peers.json").write_text(json.dumps({"context": context, "peers": list(peers), "rows": rows}, indent=1))
    state = f"attn {context['commit']}, " if context["commit"] else ""
    text = table(rows, list(peers))
    text += (f"\n\nMilliseconds, {threads_of(context)}, in turns: the best of a round, the median of {rounds} "
             f"round{'s' * (rounds > 1)}. ×: times as long as attn.\n"
             f"{context.get('processor')}, {context.get('compiler')}, {state}{context['date']}\n")
    (folder / "peers.md").write_text(text)
    print(text, end="")
    others = [f"{row['name']}, {row['shape']}: {version} computes something else: its result differs from attn's by "
              f"{error_of(peer):.1e} of its norm"
              for row in rows for version, peer in row["peers"].items() if is_other(row, peer)]
    for line in others:
        say(line)
    sys.exit(1 if others else 0)


if __name__ == "__main__":
    main()
