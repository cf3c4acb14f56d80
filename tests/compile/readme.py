#!/usr/bin/env python3
"""Compiles the C++ blocks of README.md: readme.py COMPILER README WORK FLAGS...

A ```cpp block that includes something is a program of its own. Any other is a fragment: it becomes the body of a function
behind readme_fragments.hpp, which declares what fragments use. What includes attn/mpi needs FLAGS with the folder of mpi.h,
or is left out. A comment on the line before a block says otherwise:

    <!-- file scope -->      declarations, which the fragments after it may use
    <!-- not compiled -->    is left out
"""
import subprocess
import sys
from pathlib import Path

compiler, readme, work, flags = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
has_mpi = any((Path(flag) / "mpi.h").exists() for flag in flags)
lines = readme.read_text(encoding="utf-8").splitlines()
programs, fragments = [], []
at = 0
while at < len(lines):
    if lines[at] != "```cpp":
        at += 1
        continue
    mark = lines[at - 1] if at else ""
    end = lines.index("```", at)
    block = [f'#line {at + 2} "{readme}"'] + lines[at + 1:end]
    if mark == "<!-- not compiled -->" or (any("<attn/mpi/" in line for line in block) and not has_mpi):
        pass
    elif any(line.startswith("#include") for line in block):
        programs.append(block)
    elif mark == "<!-- file scope -->":
        fragments += block
    else:
        fragments += [f"void fragment_{at + 1}() {{", *block, "}"]
    at = end + 1

prelude = Path(__file__).with_name("readme_fragments.hpp")
programs.append([f'#include "{prelude}"', *fragments])
if len(programs) < 2 or len(fragments) < 20:
    sys.exit(f"{readme}: expected programs and fragments; found {len(programs) - 1} programs")
work.mkdir(parents=True, exist_ok=True)
failed = False
for n, program in enumerate(programs):
    source = work / f"readme_{n}.cpp"
    source.write_text("\n".join(program) + "\n", encoding="utf-8")
    failed |= subprocess.run([compiler, *flags, "-std=c++20", "-fsyntax-only", str(source)]).returncode != 0
print(f"{len(programs)} files")
sys.exit(failed)
