"""A program that attn_dispatch has made of levels.

run.py levels PROGRAM QEMU LEVEL...   runs it as it is and at each level, and on a processor without AVX (QEMU: qemu-x86_64
                                      or nothing): its first line names the level, and its exit status is 0; or one
                                      sentence says that this processor has not the level
run.py symbols OBJDUMP PROGRAM        no function that files may share has instructions of AVX (of a program whose symbols are
                                      not hidden, for those are local in it)
"""
import os
import re
import subprocess
import sys


def levels(program, qemu, *names):
    def run(*command, level=""):
        done = subprocess.run(command, env=os.environ | {"ATTN_DISPATCH_LEVEL": level}, text=True, capture_output=True)
        print(f"{level or ' '.join(command)}: {done.stdout}{done.stderr}", end="")
        return done.returncode, done.stdout + done.stderr

    taken = []
    for level in ("", *names):
        code, text = run(program, level=level)
        if level and code and re.fullmatch(f"attn_dispatch: expected in ATTN_DISPATCH_LEVEL .*; found {level}\n", text):
            continue
        assert code == 0 and re.match(rf"level {re.escape(level)}", text), f"at {level or 'no level'}: {text}"
        taken.append(re.match("level ([^: \n]*)", text)[1])
    assert names[0] in taken[1:], f"{names[0]} is not among {taken}"
    assert taken[0] == taken[-1], f"expected the last level that is there, {taken[-1]}; found {taken[0]}"
    code, text = run(program, level="nothing")
    assert code == 1 and re.fullmatch("attn_dispatch: expected in ATTN_DISPATCH_LEVEL .*; found nothing\n", text), text
    if not qemu:
        print("skipped: qemu-x86_64 is not installed, so no processor without AVX was tried")
    elif os.uname().machine == "x86_64":
        code, text = run(qemu, "-cpu", "qemu64", program)
        assert code == 0 and re.match(rf"level {re.escape(names[0])}\b(?!-)", text), text


def symbols(objdump, program):
    lines = subprocess.run([objdump, "-d", "-t", program], check=True, text=True, capture_output=True).stdout.split("\n")
    shared = []  # begin, end, name of functions that are not local
    for line in lines:
        found = re.match(r"([0-9a-f]+) [^l].....F \S+\t([0-9a-f]+) +(.*)", line)
        if found and ".hidden" not in found[3] and int(found[1], 16):
            shared.append((int(found[1], 16), int(found[1], 16) + int(found[2], 16), found[3]))
    vectors = [int(line.split(":")[0], 16) for line in lines
               if re.match(r" *[0-9a-f]+:\s", line) and re.search(r"%[yz]mm|\tv[a-z0-9]+\s", line)]
    assert shared and vectors, "found no function, or no instruction of AVX"
    wrong = sorted({name for begin, end, name in shared if any(begin <= at < end for at in vectors)})
    assert not wrong, f"{len(wrong)} functions of AVX are shared: {', '.join(wrong[:5])}"
    print(f"{len(vectors)} instructions of AVX, none of them in the {len(shared)} functions that are shared")


try:
    {"levels": levels, "symbols": symbols}[sys.argv[1]](*sys.argv[2:])
except AssertionError as problem:
    sys.exit(f"wrong: {problem}")
