"""Where names are. What is defined in namespace attn is in a public header, not in a detail/ folder. Each name of the
guide's map is defined in the header that it names; and the map has every name whose header is not its own:
NAME_options, NAME_gradients and so on are in the header of NAME or in one whose name is a longer part of theirs.
Usage: names.py REPOSITORY."""
import re
import sys
from pathlib import Path

include = Path(sys.argv[1]) / "include/attn"
HELPERS = {"exp"}  # documented functions of detail/ that tests call


def without_brackets(text, word, open, close):
    """The text without `word` and the bracket that follows it."""
    while (at := re.search(rf"\b{word}\s*{re.escape(open)}", text)):
        depth, end = 1, at.end()
        while end < len(text) and depth:
            depth += (text[end] == open) - (text[end] == close)
            end += 1
        text = text[:at.start()] + text[end:]
    return text


def name_of(declaration, has_body):
    """Of a declaration, or None for one without a definition."""
    text = without_brackets(re.sub(r"\[\[.*?\]\]", "", declaration), "template", "<", ">")
    if found := re.match(r"\s*(?:struct|class|enum class|enum)\s+(\w+)(?!\w*<)", text):
        return found[1] if has_body and not re.match(rf"\s*\w+ {found[1]}\s*<", text) else None
    if found := re.match(r"\s*(?:using|concept)\s+(\w+)\s*=", text):
        return found[1]
    text = without_brackets(text, "requires", "(", ")").split("=")[0]
    if has_body or "constexpr" in text:
        if found := re.search(r"(\w+)\s*\(", text) or re.search(r"(\w+)\s*$", text):
            return found[1]
    return None


def names_in(header):
    """The names that a header defines in namespace attn and in named ones within it, but detail."""
    text = re.sub(r"//.*|^#.*(\\\n.*)*", "", header.read_text(encoding="utf-8"), flags=re.MULTILINE)
    names, scopes, parens, begin = set(), [], 0, 0
    for at in re.finditer(r"[(){};]", text):
        if at[0] in "()":
            parens += 1 if at[0] == "(" else -1
        elif parens == 0:
            head, begin = text[begin:at.start()], at.end()
            outer = all(scope is not None and scope != "detail" for scope in scopes)
            namespace = re.search(r"\bnamespace\s*(\w*)\s*$", head)
            if outer and scopes and not namespace and head.strip():
                inner = [s for s in scopes if s not in ("attn", "ATTN_ISA")]
                if name := name_of(head, at[0] == "{"):
                    names.add("::".join([*inner, name]))
            if at[0] == "{":
                scopes.append(namespace[1] if namespace else None)
            elif at[0] == "}":
                scopes.pop()
    return names


failures = []
for header in sorted(include.glob("*/detail/*.hpp")):
    failures += [f"{header.relative_to(include)} defines attn::{name}, a name of users"
                 for name in sorted(names_in(header) - HELPERS)]

headers = [h for h in sorted(include.glob("*/*.hpp")) if h.parent.name != "mpi"]
defined = {str(h.relative_to(include)): names_in(h) for h in headers}
guide = (include / "README.md").read_text(encoding="utf-8")
section = re.search(r"^## From a name to a header\n(.*?)^## ", guide, flags=re.MULTILINE | re.DOTALL)
listed, rows = set(), 0
for row in re.findall(r"^\| (`.*`) \| \[.*\]\((.*)\) \|$", section[1] if section else "", flags=re.MULTILINE):
    rows += 1
    for name in re.findall(r"`(.*?)`", row[0]):
        listed.add((name, row[1]))
        if name not in defined.get(row[1], ()):
            failures.append(f"the guide's map: {row[1]} does not define {name}")
if rows < 20:
    failures.append(f"the guide's map: expected some 30 rows; found {rows}")
stems = {Path(header).stem for header in defined}
for header, names in defined.items():
    stem = Path(header).stem
    for name in sorted(names):
        longest = max((s for s in stems if name == s or name.startswith(s + "_")), key=len, default=None)
        if longest is None or not (stem == longest or stem.startswith(longest + "_")):
            if (name, header) not in listed:
                failures.append(f"the guide's map has no {name}, which is in {header}")
if failures:
    sys.exit("\n".join(failures))
print(f"{sum(map(len, defined.values()))} names in {len(defined)} headers, {len(listed)} of them in the guide's map")
