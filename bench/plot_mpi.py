#!/usr/bin/python3
"""Draws the results of attn_bench_mpi: plot_mpi.py RESULTS.json [FOLDER]

Writes one picture, mpi.png and mpi.svg: measured strong and weak scaling, and the model of more machines. Needs matplotlib.
"""
import json
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # the folder of the sources stays as it is

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from plot_common import remark, save, title, tokens



def count_axis(axis, counts):
    axis.set_major_locator(FixedLocator(counts))
    axis.set_major_formatter(FixedFormatter([str(n) for n in counts]))
    axis.set_minor_locator(NullLocator())


def panel(axes, heading, curves, colours, ideal, x_label, y_label):
    """curves: name -> (counts, values); colours: name -> colour."""
    counts = sorted({n for x, _ in curves.values() for n in x})
    axes.set_xscale("log", base=2)
    axes.plot(counts, [ideal(n) for n in counts], color="#b5b5b5", linewidth=1, linestyle=":", zorder=0)
    for name, (x, y) in curves.items():
        axes.plot(x, y, color=colours.get(name, "#333333"), linewidth=2, marker="o", markersize=4, label=name)
    count_axis(axes.xaxis, counts)
    axes.set_title(heading, fontsize=10, color="#555555", loc="left", fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)


def measured(rows, scaling, share):
    curves = {}
    for row in rows:
        if row["scaling"] == scaling and row["processes"] > 0:
            x, y = curves.setdefault(row["operator"], ([], []))
            x.append(row["processes"])
            y.append(row["speedup"] / (row["processes"] if share else 1))
    return curves


def modelled(rows):
    curves, alone = {}, {}
    for row in rows:
        alone.setdefault(row["operator"], row["ms"])  # of one machine, the first row
        x, y = curves.setdefault(row["operator"], ([], []))
        x.append(row["machines"])
        y.append(alone[row["operator"]] / row["ms"])
    return curves


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    results = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(sys.argv[2] if len(sys.argv) == 3 else Path(sys.argv[1]).parent)
    folder.mkdir(parents=True, exist_ok=True)
    context, rows, model = results["context"], results["benchmarks"], results["model"]
    colours = dict(entry.split("=") for entry in context.get("colours", "").split())
    figure = plt.figure(figsize=(13, 4.8))
    places = [figure.add_axes((left, 0.13, 0.205, 0.62)) for left in (0.05, 0.31, 0.57)]
    strong, weak = measured(rows, "strong", False), measured(rows, "weak", True)
    panel(places[0], "measured: the same sequence", strong, colours, lambda n: n, "processes",
          "times as fast as one process")
    places[0].set_ylim(0)
    panel(places[1], "measured: longer with the processes", weak, colours, lambda n: 1, "processes",
          "share of the ideal")
    places[1].set_ylim(0, max(1.2, places[1].get_ylim()[1]))
    panel(places[2], "a model, not measured", modelled(model), colours, lambda n: n, "machines",
          "times as fast as one machine")
    places[2].set_yscale("log", base=2)
    counts = sorted({row["machines"] for row in model})
    count_axis(places[2].yaxis, counts)
    lengths = {row["operator"]: tokens(row["length"]) for row in model}
    handles, names = places[0].get_legend_handles_labels()
    figure.legend(handles, [f"{name}\n(model: {lengths[name]} tokens)" for name in names], loc="upper left",
                  bbox_to_anchor=(0.79, 0.78), frameon=False, fontsize=8.5, labelspacing=1)
    title(figure, "One sequence over several processes (MPI)", context)
    remark(figure, f"model: {context['bandwidth_gb_per_s']} GB/s, {context['latency_us']} µs")
    save(figure, folder, "mpi")


if __name__ == "__main__":
    main()
