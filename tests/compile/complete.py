"""What names every operator by hand names every operator: the benchmark, the tests of what is refused, the texts, the
example that trains. And every option is read, and what is asked of options exists.
Usage: complete.py REPOSITORY OPERATOR..., each as FAMILY/NAME."""
import re
import sys
from pathlib import Path

top, operators = Path(sys.argv[1]), sys.argv[2:]
# Where an operator is left out on purpose, and why.
EXEMPT = {
    ("benchmark", "pattern_softmax"): "its patterns are measured: block, strided, bigbird",
    ("bfloat16", "pattern_softmax"): "its patterns are the entries of block, strided, bigbird",
    ("naive reference", "pattern_softmax"): "that of any pattern, reference/pattern.hpp",
    ("example 15", "pattern_softmax"): "its patterns are trained: block, strided, bigbird",
    ("example 15", "selected_keys"): "its lists come from an indexer, which is trained with it",
    ("example 15", "neighborhood"): "for grids; over a line it is a window",
    ("example 15", "topk_blocks"): "a block of so short a context holds all of it",
    ("example 15", "delta_rule"): "its rates are learned from the tokens",
    ("example 15", "dplr"): "its vectors a and b are learned from the tokens",
}


def text(*patterns):
    files = sorted(f for pattern in patterns for f in top.glob(pattern))
    if not files:
        sys.exit(f"no file is there: {patterns}")
    return "\n".join(f.read_text() for f in files)


readme = text("README.md")
places = {  # what is looked through, and what must be there
    "benchmark": (text("bench/*.cpp"), r'"{name}"'),
    "example 15": (text("examples/byte_language_model/*.hpp"), r'"{name}"'),
    "table of README.md": (readme, r"^\| `{name}` \|"),
    "call in README.md": (readme, r"^attn::{name}\("),
    "guide": (text("include/attn/README.md"), r"\b{name}\b|the {family}_ family"),
    "attn.hpp": (text("include/attn/attn.hpp"), r"#include <attn/{family}/{name}.hpp>"),
}
own = {  # files of the operator itself
    "laws": ("tests/laws/operators/{name}.cpp", r"\blaw_entries\b"),
    "bfloat16": ("tests/laws/operators/{name}.cpp", r"\bstored_entries\b"),
    "refusals": ("tests/{family}/*.cpp", r"^TEST_CASE\([^)]*\b{name}\b[^)]*refus"),
    "naive reference": ("tests/reference/*.hpp", r"\b{name}\b"),
}
missing, exempt = [], set(EXEMPT)
for operator in operators:
    family, name = operator.split("/")

    def find(place, where, pattern):
        found = re.search(pattern.format(family=family, name=name), where, re.MULTILINE)
        if (place, name) in EXEMPT:
            exempt.discard((place, name))
            if found:
                missing.append(f"{place} has {name} now: the exemption can go")
        elif not found:
            missing.append(f"{place}: {name}")

    for place, (where, pattern) in places.items():
        find(place, where, pattern)
    for place, (files, pattern) in own.items():
        find(place, text(files.format(family=family, name=name)), pattern)

headers = {str(h.relative_to(top / "include/attn").with_suffix("")) for h in top.glob("include/attn/*/*_backward.hpp")}
headers = {h.removesuffix("_backward") for h in headers if h.split("/")[0] not in ("layers", "mpi")}
others = {"softmax/merge_softmax", "softmax/lightning_indexer"}  # have gradients, but are no operators of q, k, v, out
missing += [f"list of operators in tests/CMakeLists.txt: {h}" for h in sorted(headers - others - set(operators))]
missing += [f"{place} exempts {name}, which is none" for place, name in sorted(exempt)]
count = re.search(r"with (\d+) operators", readme)
if not count or int(count[1]) != len(operators):
    missing.append(f"README.md: expected the number of operators, {len(operators)}; found {count and count[1]}")

# Of a misspelt option `if constexpr (requires { options.NAME; })` would be false without a word.
code = re.sub(r"//.*", "", text("include/attn/**/*.hpp"))
asked = set(re.findall(r"requires \{ (?:\w+\.)?(?:options|given|gradients)\.(\w+); \}", code))
fields, inside = set(), False
public = text("include/attn/*/*.hpp", "include/attn/mpi/detail/*.hpp")
for line in re.sub(r"//.*|static constexpr[^;]*;", "", public).splitlines():
    inside = line != "};" and (inside or re.match(r"struct \w+_(options|gradients)( : .*)? {$", line) is not None)
    if inside and re.match(r"  (?!using|static)[\w:<>, ]+ \w+[^()]*;$", line):
        fields |= set(re.findall(r"(\w+)(?:{.*?}| = .*?)?[,;]", re.sub(r"<.*?>+", "", line)))
missing += [f"options that have a {name}, for which include/ asks" for name in sorted(asked - fields)]
missing += [f"reader of the option {name}" for name in sorted(fields - set(re.findall(r"(?<=[\w\])])[.>](\w+)", code)))]
# What has a list of shared fields is compared with it (softmax/detail/shared_fields.hpp).
code = text("include/attn/softmax/*.hpp", "include/attn/low_rank/*.hpp", "include/attn/layers/*.hpp")
listed = re.findall(r"^struct (\w+) {(?:(?!^};).)*? unsigned shared =", code, re.MULTILINE | re.DOTALL)
compared = text("tests/softmax/shared_fields.cpp")
missing += [f"tests/softmax/shared_fields.cpp: {name}" for name in listed if not re.search(rf"::{name}\b", compared)]
if missing:
    sys.exit("missing:\n  " + "\n  ".join(missing))
print(f"{len(operators)} operators are in {len(places) + len(own)} places each, {len(fields)} options are read")
