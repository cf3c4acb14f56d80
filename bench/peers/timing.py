"""How a peer that is written in Python times: the same for all of them."""
import json
import sys
import time


def seconds_of(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def best_of(call, seconds, least=3, most=50):
    """The best time of as many runs as fit, and how many they were."""
    times = [seconds_of(call)]
    while len(times) < most and (len(times) < least or sum(times) < seconds):
        times.append(seconds_of(call))
        if sum(times) > 4 * seconds:
            break
    return min(times), len(times)


def answer(cases, prepare, error_of):
    """Prints a line for each case. prepare(case, length) gives what is to be timed, or None where there is no such
    operator; error_of(case) compares with what attn computed."""
    for case in cases:
        line = {"name": case["key"]}
        try:
            short = prepare(case, case["length"] // 4)
            if short is None:
                continue
            short()  # what is set up only once
            expected = seconds_of(short) * (4 if case["linear"] else 16)
            if expected > case["most_seconds"]:
                line["note"] = f"expected to take {expected:.0f} s"
            else:
                call = prepare(case, case["length"])
                if expected < 1:
                    call()
                best, runs = best_of(call, case["seconds"])
                line.update(ms=1e3 * best, runs=runs)
            if case.get("folder"):
                line["error"] = error_of(case)
        except Exception as error:  # one operator that a version does not have is no reason to lose the others
            line = {"name": case["key"], "note": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        print(json.dumps(line), flush=True)


def asked(version):
    """The cases, after answering --version."""
    if sys.argv[1:] == ["--version"]:
        print(version)
        sys.exit(0)
    return json.load(sys.stdin)
