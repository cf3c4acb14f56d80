#!/usr/bin/env python3
"""Checks README.md and the README.md of every folder: readme.py COMPILER ROOT WORK FLAGS...

Length: ROOT/README.md has at most 400 lines and 3000 words.

Links: each relative link names a file that exists and, behind a #, one of its headings.

Code: each ```cpp block compiles. A block that includes something is a program. Any other is a fragment: it becomes the
body of a function behind readme_fragments.hpp, which declares what fragments use. Programs that include attn/mpi need
FLAGS with the folder of mpi.h, or are left out. A comment on the line before a block says otherwise:

    <!-- file scope -->      declarations, which the fragments after it may use
    <!-- not compiled -->    is left out

All fragments are one file, so that attn is parsed once for them; each program is compiled alone, with its own includes.
"""
import re
import subprocess
import sys
from pathlib import Path

compiler, root, work, flags = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
has_mpi = any((Path(flag) / "mpi.h").exists() for flag in flags)
folders = ("include", "tests", "bench", "examples")
readmes = [root / "README.md", *sorted(file for folder in folders for file in (root / folder).rglob("README.md"))]
failures = []

# --- length -----------------------------------------------------------------------------------------------------------
text = readmes[0].read_text(encoding="utf-8")
lines, words = len(text.splitlines()), len(text.split())
if lines > 400 or words > 3000:
    failures.append(f"README.md: expected at most 400 lines and 3000 words; found {lines} and {words}")


# --- links ------------------------------------------------------------------------------------------------------------
def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(file):
    """The anchors that GitHub makes of the headings: lower case, without punctuation, hyphens for spaces."""
    found = []
    for heading in re.findall(r"^#+ (.*)", without_code(file.read_text(encoding="utf-8")), flags=re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        again = sum(re.fullmatch(re.escape(anchor) + r"(-\d+)?", other) is not None for other in found)
        found.append(f"{anchor}-{again}" if again else anchor)
    return found


links = 0
for readme in readmes:
    prose = re.sub(r"`[^`]*`", "", without_code(readme.read_text(encoding="utf-8")))
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        links += 1
        path, _, anchor = target.partition("#")
        file = readme.parent / path if path else readme
        name = readme.relative_to(root)
        if not file.exists():
            failures.append(f"{name}: link to {target}: there is no such file")
        elif anchor and (file.suffix != ".md" or anchor not in anchors(file)):
            failures.append(f"{name}: link to {target}: there is no such heading")

# --- code -------------------------------------------------------------------------------------------------------------
programs, fragments = [], []
blocks = set()
for readme in readmes:
    lines_of = readme.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines_of):
        if lines_of[at] != "```cpp":
            at += 1
            continue
        mark = lines_of[at - 1] if at else ""
        end = lines_of.index("```", at)
        code = lines_of[at + 1:end]
        block = [f'#line {at + 2} "{readme}"'] + code
        at = end + 1
        if mark == "<!-- not compiled -->" or (any("<attn/mpi/" in line for line in code) and not has_mpi):
            continue
        if "\n".join(code) in blocks:  # shown twice, compiled once
            continue
        blocks.add("\n".join(code))
        if any(line.startswith("#include") for line in code):
            programs.append(block)
        elif mark == "<!-- file scope -->":
            fragments += block
        else:
            fragments += [f"void fragment_{len(blocks)}() {{", *block, "}"]

if not programs or len(blocks) < 20:
    failures.append(f"expected programs and fragments in the README files; found {len(blocks)} blocks")
prelude = Path(__file__).with_name("readme_fragments.hpp")
work.mkdir(parents=True, exist_ok=True)
for n, source in enumerate([[f'#include "{prelude}"', *fragments], *programs]):
    file = work / f"readme_{n}.cpp"
    file.write_text("\n".join(source) + "\n", encoding="utf-8")
    if subprocess.run([compiler, *flags, "-std=c++20", "-fsyntax-only", str(file)]).returncode != 0:
        failures.append(f"{file.name}: code of the README files that does not compile")

print(f"README.md: {lines} lines, {words} words; {len(readmes)} files: {links} links, {len(blocks)} blocks of code")
for failure in failures:
    print(failure)
sys.exit(bool(failures))
