#!/usr/bin/env python3
"""What a user's compiler has to do for a header and for a call, measured without a clock and compared with weights.txt.

    weights.py headers                                   lines of code that each public header includes from attn, and which
                                                         headers of others, beside the usual ones
    weights.py precompile FILE COMPILER FLAGS...         Eigen, for the next
    weights.py call SOURCE FILE COMPILER FLAGS...        bytes of machine code of SOURCE, a file here that makes a call
    weights.py write COMPILER FLAGS...                   writes weights.txt anew: after a change that is worth its weight

FLAGS say where attn and Eigen are; those that the numbers depend on are below. Lines are the same for every compiler;
they may differ by 3 %, up or down, and headers not at all. Machine code is compared so closely for the compiler and the
Eigen of the table alone; elsewhere it may be 1.5 times as much, for what others emit differs by up to a third.
"""
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

here = Path(__file__).parent
include = here.parent.parent / "include"
table = here / "weights.txt"
margin, margin_of_others = 0.03, 0.5
flags = ["-std=c++20", "-O1", "-march=x86-64-v3"]
calls = sorted(here.glob("one_*.cpp")) + sorted(here.glob("model_*.cpp"))
again = f"If that is meant: python3 tests/compile/{Path(__file__).name} write g++ -I include -isystem /usr/include/eigen3"


# --- headers ----------------------------------------------------------------------------------------------------------
@cache
def closure(header):
    """The headers of attn that `header` includes, itself among them, and the others."""
    own, others = {header}, set()
    for name in re.findall(r"^#include <(.+)>", (include / header).read_text(encoding="utf-8"), flags=re.MULTILINE):
        if (include / name).exists():
            own, others = own | closure(name)[0], others | closure(name)[1]
        elif not name.startswith("attn/"):
            others = others | {name}
    return own, others


@cache
def code_lines(header):
    lines = (line.split("//")[0].strip() for line in (include / header).read_text(encoding="utf-8").splitlines())
    return sum(line != "" and not line.startswith("#") for line in lines)


def headers():
    """By header: [lines, others...], those of `usual`, which most include, apart."""
    usual = closure("attn/core/rotary.hpp")[1]
    found = {"usual": [len(usual), *sorted(usual)]}
    for file in sorted(include.glob("attn/*.hpp")) + sorted(include.glob("attn/*/*.hpp")):
        own, others = closure(str(file.relative_to(include)))
        found[str(file.relative_to(include))] = [sum(map(code_lines, own)), *sorted(others - usual)]
    return found


# --- calls ------------------------------------------------------------------------------------------------------------
def precompile(file, compiler, more):
    Path(file).write_text("#include <Eigen/Core>\n", encoding="utf-8")
    subprocess.run([compiler, *flags, *more, "-x", "c++-header", str(file), "-o", f"{file}.gch"], check=True)


def machine_code(source, precompiled, compiler, more):
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "call.o"
        subprocess.run([compiler, *flags, *more, "-include", str(precompiled), "-c", str(source), "-o", str(made)],
                       check=True)
        sections = subprocess.run(["size", "-A", str(made)], check=True, capture_output=True, text=True).stdout
    return sum(int(size) for size in re.findall(r"^\.text\S*\s+(\d+)", sections, flags=re.MULTILINE))


def made_by(compiler, more):
    """The compiler and Eigen, on which machine code depends."""
    macros = "__GNUC__.__GNUC_MINOR__.__GNUC_PATCHLEVEL__ Eigen EIGEN_WORLD_VERSION.EIGEN_MAJOR_VERSION.EIGEN_MINOR_VERSION"
    text = subprocess.run([compiler, *flags, *more, "-E", "-P", "-x", "c++", "-"], check=True, capture_output=True,
                          text=True, input=f"#include <Eigen/Core>\nweight: GCC {macros}\n").stdout
    return re.sub(r"\s*\.\s*", ".", re.search(r"weight: (.*)", text)[1])


# --- the table --------------------------------------------------------------------------------------------------------
def read():
    rows = [line.split() for line in table.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    by = next(" ".join(row[2:]) for row in rows if row[:2] == ["made", "by"])
    return by, {row[0]: [int(row[1]), *row[2:]] for row in rows if row[0] != "made"}


def write(compiler, more):
    with table.open("w", encoding="utf-8") as out, tempfile.TemporaryDirectory() as folder:
        precompiled = Path(folder) / "eigen.hpp"
        precompile(precompiled, compiler, more)
        out.write("# Lines of code of attn that a header includes, and headers of others that it alone needs; then bytes of\n"
                  f"# machine code of one call, {' '.join(flags)}. By weights.py, which says how to write this file anew.\n")
        for name, row in headers().items():
            print(name, *row, file=out)
        print("\nmade by", made_by(compiler, more), file=out)
        for source in calls:
            print(source.stem, machine_code(source, precompiled, compiler, more), file=out)


def compare(name, found, expected, least, most):
    text = f"{name}: {found}, {found / expected - 1:+.1%} of {expected} in weights.txt; allowed are {least:+.0%} to {most:+.0%}"
    if least <= found / expected - 1 <= most:
        return None
    return text


def main(what, *rest):
    if what == "write":
        return write(rest[0], rest[1:])
    if what == "precompile":
        return precompile(rest[0], rest[1], rest[2:])
    by, known = read()
    failures = []
    if what == "headers":
        found = headers()
        for name in sorted(found.keys() | {name for name in known if "/" in name}):
            if name not in found or name not in known:
                failures.append(f"{name}: {'not in weights.txt' if name in found else 'in weights.txt, but not there'}")
                continue
            failures.append(compare(name, found[name][0], known[name][0], -margin, margin))
            if found[name][1:] != known[name][1:]:
                failures.append(f"{name}: includes {' '.join(found[name][1:]) or 'nothing of others'}; in weights.txt "
                                f"{' '.join(known[name][1:]) or 'nothing'}")
        print(f"{len(found) - 1} headers")
    else:
        source, precompiled, compiler, *more = rest
        name, this = Path(source).stem, made_by(compiler, more)
        size = machine_code(source, precompiled, compiler, more)
        print(f"{name}: {size} bytes of machine code by {this}; weights.txt is by {by}")
        if name not in known:
            failures.append(f"{name}: not in weights.txt")
        elif this == by:
            failures.append(compare(name, size, known[name][0], -margin, margin))
        else:
            failures.append(compare(name, size, known[name][0], -1, margin_of_others))
    failures = [failure for failure in failures if failure]
    if failures:
        sys.exit("\n".join([*failures, again]))


main(*sys.argv[1:])
