"""attn::compiled: every run that a public header calls is among those that it holds, and a program leaves these to it,
links, and gets from it what it computes itself; one compiled with other flags does not link, and the linker names its
instruction set.

compiled.py REPOSITORY BUILD NM COMPILER FLAGS...    BUILD has the sources that CMake made; FLAGS say where attn and Eigen are
"""
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

top, build, nm, compiler, *flags = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
include, here = top / "include", Path(__file__).parent
# Runs that a public header calls, which are not instantiated by themselves, and why.
EXEMPT = {
    "run_aft_full_step": "appends to the caller's cache; full_step_rows is held",
    "run_latent_attention_step": "appends to the caller's cache; absorb_queries, finish_absorbed are held",
    "run_reversible_backward": "of the caller's functions",
    "run_rotary": "a few lines around tables of the caller's types",
}


def run(*command, works=True):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    text = done.stdout + done.stderr
    if (done.returncode == 0) != works:
        sys.exit(f"{'failed' if works else 'succeeded'}: {' '.join(map(str, command))}\n{text}")
    return text


# --- what is held -----------------------------------------------------------------------------------------------------
held, called = set(), set()
for file in include.glob("attn/**/*.hpp"):
    text = file.read_text(encoding="utf-8")
    held |= set(re.findall(r"^#define ATTN_RUN\w*\([^)]*\) void (\w+)", text, re.MULTILINE))
    if file.parent.name != "detail" and "/mpi/" not in str(file):
        called |= set(re.findall(r"detail::((?:run|call)_\w+)(?:<[^>]*>)?\(", text))
missing = called - held - set(EXEMPT)
if missing or not called:
    sys.exit(f"attn::compiled does not hold {' '.join(sorted(missing))}; see include/attn/core/detail/compiled.hpp")
if unused := {name for name in EXEMPT if name in held or name not in called}:
    sys.exit(f"held, or called no more: {' '.join(sorted(unused))}")
# A source has the headers that its header includes: what a run names is defined in them, not declared alone.
@cache
def closure(header):
    text = (include / header).read_text(encoding="utf-8")
    included = re.findall(r"^#include <(attn/\S+\.hpp)>", text, re.MULTILINE)
    return {header}.union(*map(closure, included))


for file in include.glob("attn/**/*.hpp"):
    runs = re.findall(r"^#define ATTN_RUN\w*\((?:.*\\\n)*.*", file.read_text(encoding="utf-8"), re.MULTILINE)
    if not runs or file.name == "compiled.hpp":
        continue
    seen = "\n".join((include / header).read_text(encoding="utf-8") for header in closure(str(file.relative_to(include))))
    for word in set(re.findall(r"\w+", " ".join(runs))):
        if re.search(rf"^(struct|class) {word};", seen, re.MULTILINE) and not re.search(
                rf"^(struct|class) (\[\[.*\]\] )?{word}\b[^;]*\{{", seen, re.MULTILINE):
            sys.exit(f"{file}: {word} is declared alone; put the line of ATTN_RUN into the public header")
# Nor is its header among those that are precompiled: it would not be included by the source.
precompiled = re.search(r"target_precompile_headers\(attn_compiled PRIVATE <(.*)>\)",
                        (include / "attn/core/detail/compiled.cmake").read_text(encoding="utf-8"))[1]
if "attn/core/detail/compiled.hpp" in closure(precompiled):
    sys.exit(f"{precompiled} is precompiled, so no header that it includes may name runs")
print(f"{len(called)} runs are called by public headers, {len(held)} held")

# --- a program --------------------------------------------------------------------------------------------------------
sources = ["softmax/full_softmax_run", "kernel/linear", "kernel/sums_run", "kernel/feature_maps"]
marched = ["-march=x86-64-v2"] if run(compiler, "-dumpmachine").startswith("x86_64") else []
with tempfile.TemporaryDirectory() as folder:
    folder = Path(folder)

    def compile_one(source, name, *more):
        run(compiler, "-std=c++20", *flags, *more, "-c", source, "-o", folder / name)
        return folder / name

    objects = [compile_one(build / "compiled" / f"{name}_float.cpp", f"{Path(name).name}.o", *marched) for name in sources]
    using = ["-DATTN_COMPILED", "-DATTN_COMPILED_FLOAT"]
    calls = here / "compiled_calls.cpp"
    symbols = run(nm, "-C", compile_one(calls, "more.o", *marched, *using, "-DATTN_TEST_MORE_CALLS")).splitlines()
    runs = [line for line in symbols if re.search(r" void attn::\w+::detail::run_\w+[<(]", line)]
    own = [line for line in runs if " U " not in line and not any(f"{name}<" in line for name in EXEMPT)]
    if own or sum(" U " in line for line in runs) != 4:
        sys.exit("expected four runs, none of them the program's own; found\n" + "\n".join(runs))
    if features := [line for line in symbols if re.search(r" [VW] .*detail::mapped_features<\w+, [^>]*>::keys", line)]:
        sys.exit("expected no features of the program's own; found\n" + "\n".join(features))
    program, alone = compile_one(calls, "calls.o", *marched, *using), compile_one(calls, "alone.o", *marched)
    results = []
    for name, parts in ("linked", [program, *objects]), ("header_only", [alone]):
        run(compiler, *parts, "-o", folder / name, "-pthread")
        results.append(run(folder / name))
        print(name, results[-1], end="")
    if results[0] != results[1]:
        sys.exit("expected the same numbers")
    if marched:
        other = compile_one(calls, "other.o", "-march=x86-64-v3", *using)
        text = run(compiler, other, *objects, "-o", folder / "other", "-pthread", works=False)
        if not re.search(r"undefined reference to .*attn::avx2_\w+::detail::run_full_softmax", text):
            sys.exit(f"expected the linker to name the instruction set; found\n{text}")
        print(re.search(r"undefined reference to .*", text)[0])
