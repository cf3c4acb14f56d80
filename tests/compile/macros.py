# macros.py COMPILER FOLDER ALLOWED... -- FLAGS...: fails where attn's headers, in FOLDER, use a word that is a macro of
# a header that programs may include before, or leave a macro defined that is not one of ALLOWED (names, or beginnings of
# names that end in *). What programs may define before, such as ATTN_AMX_MODEL, no header defines.
import pathlib
import re
import subprocess
import sys

# Macros of other headers, in lower case or as short as names are. One with "(" concerns calls only: attn writes
# (std::min)(a, b), validator check{"name"}, and functions of other names. Not listed, since attn cannot avoid them: those
# of term.h (lines, columns, 600 others), and abs and round of old Arduino cores.
foreign = {
    "windows.h, with and without NOMINMAX": """min( max( near far NEAR FAR small hyper interface pascal cdecl CONST VOID
        IN OUT OPTIONAL ERROR NO_ERROR DELETE IGNORE INFINITE STRICT TRUE FALSE THIS THIS_ ABSOLUTE RELATIVE OVERFLOW
        UNDERFLOW DOMAIN TRANSPARENT OPAQUE UNALIGNED CALLBACK WINAPI APIENTRY PURE STDMETHOD( TEXT( MAX_PATH
        GetObject CreateEvent SendMessage LoadImage CopyMemory ZeroMemory FillMemory MoveMemory Yield( environ""",
    "Qt": "slots signals emit foreach( forever Q_OBJECT Q_EMIT Q_SLOTS Q_SIGNALS Q_FOREACH(",
    "X11/Xlib.h": """None Status Bool True False Success Always Never Above Below Opposite Complex Convex Nonconvex
        Unsorted YSorted XSorted GrayScale KeyPress KeyRelease FocusIn FocusOut CursorShape DontCare IsUnmapped
        AllPlanes ControlMask ShiftMask LockMask Expose NotUseful WhenMapped Nonlinear Inferior""",
    "AssertMacros.h and ConditionalMacros.h of Apple": """check( verify( require( check_noerr( verify_noerr( require_noerr(
        check_string( require_action( require_quiet( nil Nil YES NO TARGET_OS_MAC""",
    "sys/param.h, sys/sysmacros.h, sys/types.h": """MIN( MAX( major minor makedev( howmany( roundup( powerof2( setbit(
        clrbit( isset( isclr( NBBY MAXPATHLEN""",
    "GCC without -std=c++20": "unix linux i386 mips sparc sun",
    "complex.h, math.h": "I _Complex_I M_PI M_E M_LN2 M_SQRT2 HUGE DOMAIN SING PLOSS TLOSS OVERFLOW signgam",
    "termios.h": "B0 B50 B75 B110 B134 B150 B200 B300 B600 B1200 CR0 NL0 TAB0 BS0 FF0 VT0 ECHO CS8 NOFLSH",
    "curses.h": """getch( ungetch( inch( addch( insch( delch( refresh( border( scroll( timeout( touchline(
        standend( standout( attron( attroff( attrset( getyx( stdscr OK ERR KEY_MAX COLOR_PAIR(""",
    "Arduino.h": """bit( sq( F( constrain( radians( degrees( interrupts( noInterrupts( lowByte( highByte( bitRead( bitSet(
        bitClear( HIGH LOW INPUT OUTPUT PI HALF_PI TWO_PI DEG_TO_RAD SERIAL DISPLAY CHANGE RISING FALLING DEFAULT
        EXTERNAL INTERNAL LED_BUILTIN B1 B00 B01 B10 B11""",
    "Unreal Engine, Google's logging, testing": """check( checkf( verify( verifyf( ensure( ensureMsgf( TEXT( CHECK( DCHECK(
        CHECK_EQ( LOG( VLOG( DLOG( EXPECT( ASSERT( ASSERT_TRUE( FAIL( REQUIRE( TEST( SECTION( INFO( WARN( assert(""",
}

split = sys.argv.index("--")
compiler, folder, allowed, flags = sys.argv[1], sys.argv[2], sys.argv[3:split], sys.argv[split + 1 :]


def preprocessed(source, *more):
    arguments = [compiler, "-std=c++20", "-x", "c++", "-E", "-", *more, *flags]
    return subprocess.run(arguments, input=source, capture_output=True, text=True, check=True).stdout.splitlines()


# Used: what attn includes of others comes first, as it may in a program; then the macros; then attn.
headers = sorted(pathlib.Path(folder).rglob("*.hpp"))
others = {include for file in headers for include in re.findall(r"^#include (<(?!attn/).*>)", file.read_text(), re.M)}
source = "".join(f"#if __has_include({other})\n#include {other}\n#endif\n" for other in sorted(others))
origin = {}
for header, names in foreign.items():
    for name in names.split():
        origin[name.rstrip("(")] = header
        source += f"#undef {name.rstrip('(')}\n#define {name.replace('(', '(...)')} attn_uses_{name.rstrip('(')}\n"
has_mpi = any((pathlib.Path(flag) / "mpi.h").exists() for flag in flags)
for file in headers:
    if has_mpi or "mpi" not in file.relative_to(folder).parts:
        source += f"#include <{file.relative_to(pathlib.Path(folder).parent)}>\n"
used, at, number = set(), "", 0
for line in preprocessed(source):
    if marker := re.match(r'# (\d+) "(.*)"', line):
        at, number = marker[2], int(marker[1]) - 1
    else:
        number += 1
        used |= {f"{at}:{number}: {name} is a macro of {origin[name]}" for name in re.findall(r"attn_uses_(\w+)", line)}
for one in sorted(used):
    print(one)

# Left defined.
text = preprocessed("#include <attn/attn.hpp>\n", "-dD")
left, ours = {}, False
for line in text:
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
sys.exit(bool(used) or bool(leaked) or not left)
