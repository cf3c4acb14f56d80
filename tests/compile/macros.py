# macros.py COMPILER ALLOWED... -- FLAGS...: fails where attn's headers leave a macro defined that is not one of ALLOWED
# (names, or beginnings of names that end in *). What programs may define before, such as ATTN_AMX_MODEL, no header defines.
import re
import subprocess
import sys

split = sys.argv.index("--")
compiler, allowed, flags = sys.argv[1], sys.argv[2:split], sys.argv[split + 1 :]
source = "#include <attn/attn.hpp>\n"
text = subprocess.run(
    [compiler, "-std=c++20", "-x", "c++", "-E", "-dD", "-", *flags], input=source, capture_output=True, text=True, check=True
).stdout
left, ours = {}, False
for line in text.splitlines():
    if marker := re.match(r'# \d+ "(.*)"', line):
        ours = "/attn/" in marker[1] and marker[1].endswith(".hpp")
        file = marker[1]
    elif ours and (define := re.match(r"#define (\w+)", line)):
        left[define[1]] = file
    elif undefine := re.match(r"#undef (\w+)", line):
        left.pop(undefine[1], None)
leaked = {
    name: file
    for name, file in left.items()
    if not any(name == a or (a.endswith("*") and name.startswith(a[:-1])) for a in allowed)
}
for name, file in leaked.items():
    print(f"{file} leaves {name} defined")
if not left:
    print("no macro found at all: is this the compiler's output?")
sys.exit(bool(leaked) or not left)
