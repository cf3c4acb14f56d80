"""What attn is compared in with other libraries: operators at one length, and where attn_bench's numbers are.

A peer is a program that `bench/run --peers` starts. PEER --version prints one line, its name and version, and exits
with another status than 0 if the library is missing. PEER reads a list of cases as JSON from its standard input and
prints one line of JSON for each case it knows: {"name": the case's key, "ms", "runs", "error"}, or {"name", "note"}
where there is no figure. error: how far its result is from attn's, relative to the norm, where the case has a folder.
The variable ATTN_PEER_THREADS says how many threads it may use.
"""

LENGTH, CACHE, CHECKED = 4096, 8192, 512  # tokens of a call, of a cache, and where results are compared
QUERIES_PER_KEY_HEAD = 4  # of a decoder


def case(form, dim=64, element="float", heads=8):
    """Named as attn_bench names it."""
    length = CACHE if "_decode" in form else LENGTH
    suffix = "" if element == "float" else f"_{element}"
    return {"name": f"{form}{suffix}/{length}", "form": form, "length": length, "dim": dim, "heads": heads,
            "element": element, "key": f"{form}{suffix}/{length} D{dim}"}


FLOAT = [case("full_softmax"), case("full_softmax", dim=128), case("full_softmax_causal"), case("sliding_window"),
         case("sliding_window_causal"), case("full_softmax_decode", dim=128), case("linformer"), case("nystrom"),
         case("linear"), case("linear_causal"), case("delta_rule"), case("performer"), case("fnet"), case("aft_simple"),
         case("aft_full"), case("full_softmax_backward"), case("full_softmax_backward_causal"), case("linear_backward"),
         case("delta_rule_backward"), case("aft_simple_backward"), case("aft_full_backward")]
BFLOAT16 = [case(form, element="bfloat16")
            for form in ("full_softmax", "full_softmax_causal", "linformer", "linear", "full_softmax_backward",
                         "full_softmax_backward_causal")] + [case("full_softmax_decode", dim=128, element="bfloat16")]


def shape_of(one):
    """"8 heads of 64", "32 over 8 heads of 128"."""
    heads = one["heads"]
    shape = f"{heads} heads" if "_decode" not in one["form"] else f"{QUERIES_PER_KEY_HEAD * heads} over {heads} heads"
    return f"{shape} of {one['dim']}"


def threads_of(context):
    """"one thread", "16 threads"."""
    threads = int(context.get("threads", 1))
    return "one thread" if threads == 1 else f"{threads} threads"


def times_as_long(ratio):
    """Two digits: 0.91 ×, 2.0 ×, 16 ×."""
    return f"{ratio:.1f} ×" if 1 <= ratio < 9.95 else f"{ratio:.2g} ×"
