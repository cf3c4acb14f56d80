"""Error against time: one curve per operator over its settings."""
import math
import textwrap

import matplotlib.pyplot as plt
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

from plot_common import common_length, remark, save, seconds, title, tokens, value_axis, write_not_run

EXACT = 1e-4  # below this an error is rounding
LABELS = {"lsh": "lsh (keys = queries)"}  # its error is against full softmax over those


def covered(axes, curves):
    """Boxes of points and lines (lists of (time, error)), which no name should cover."""
    boxes = []
    unit = axes.figure.dpi / 72

    def cover(x, y, reach):
        boxes.append(Bbox.from_extents(x - reach, y - reach, x + reach, y + reach))

    for points in curves:
        pixels = axes.transData.transform(points)
        for x, y in pixels:
            cover(x, y, 4 * unit)
        for (x, y), (to_x, to_y) in zip(pixels, pixels[1:]):
            steps = max(1, int(math.hypot(to_x - x, to_y - y) / (4 * unit)))
            for n in range(1, steps):
                cover(x + (to_x - x) * n / steps, y + (to_y - y) * n / steps, 2 * unit)
    return boxes


def label_curves(axes, curves, baseline):
    """The name of every operator beside one of its points (time, error), at the nearest free place, not on the line at
    the error `baseline`."""
    renderer = axes.figure.canvas.get_renderer()
    inside = axes.get_window_extent(renderer).padded(-1)
    taken = covered(axes, [points for points, _ in curves] + [[(x, baseline) for x in axes.get_xlim()]])
    ups = sorted(range(-132, 133, 6), key=abs)
    for points, c in sorted(curves, key=lambda p: -p[0][-1][0]):
        anchors = [points[-1], points[0], *points[1:-1]] if len(points) > 1 else points
        places = [(anchor, side, up) for up in ups for anchor in anchors for side in ("left", "right")]
        for (x, y), side, up in places:
            out = 9 + 0.4 * abs(up)
            line = {"arrowstyle": "-", "color": c.colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 4,
                    "relpos": (0 if side == "left" else 1, 0.5)}
            name = LABELS.get(c.operator, c.operator)
            text = axes.annotate(name, (x, y), xytext=(out if side == "left" else -out, up),
                                 textcoords="offset points", ha=side, va="center", color=c.colour, fontsize=8.5,
                                 fontweight="bold", arrowprops=line if abs(up) > 6 else None)
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # of the words, without the line
            if inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1) and not box.count_overlaps(taken):
                taken.append(box)
                break
            text.remove()


def parted(c, length, full):
    """The rows of its settings, fastest first: those drawn; those that see every token of the data, which are exact
    there and say nothing of another length; approximations slower than full softmax. The setting of the other pictures
    is drawn even if it is slower."""
    drawn, seeing, slower = [], [], []
    for row in c.trade(length):
        if row.get("sees_every_token"):
            seeing.append(row)
        elif not full or row is c.at[length] or row["best_ms"] <= full.at[length]["best_ms"]:
            drawn.append(row)
        elif row["rel_error"] > EXACT:
            slower.append(row)
    return drawn, seeing, slower


def panel(upper, lower, curves, suffix, length, baseline):
    """One set of real data: approximations above; what is exact but for rounding, below the break of the axis. Every
    point is at its time at `length`. `curves`: pairs of a curve and its rows."""
    for axes in (upper, lower):
        drawn = []
        for c, rows in curves:
            points = [(row["best_ms"], max(row["rel_error" + suffix], 3e-8)) for row in rows]
            if (max(error for _, error in points) > EXACT) != (axes is upper):
                continue
            axes.plot(*zip(*points), linewidth=1.4, color=c.colour, zorder=2)
            for row, point in zip(rows, points):  # small dots lie on large ones, not beneath
                usual = row is c.at[length]
                axes.plot(*point, "o", markersize=7.5 if usual else 3.5, color=c.colour,
                          markeredgecolor="white" if usual else c.colour, zorder=3 if usual else 4)
            drawn.append((points, c))
        label_curves(axes, drawn, baseline)
        value_axis(axes.xaxis, seconds)
    upper.yaxis.set_major_locator(FixedLocator([0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10]))
    upper.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    upper.yaxis.set_minor_locator(NullLocator())
    lower.yaxis.set_major_locator(FixedLocator([1e-7, 1e-6, 1e-5]))
    lower.yaxis.set_minor_locator(NullLocator())


def error_picture(context, curves, folder, name, heading):
    """All times are at one length. What was not run there is named, and nothing is compared with it."""
    measured = [c for c in curves if any("rel_error" in row for row in c.at.values())]
    if not measured:
        return
    length = common_length(measured)
    timed = [c for c in measured if length in c.at]
    full = next((c for c in timed if c.operator == "full_softmax"), None)
    parts = [(c, *parted(c, length, full)) for c in timed]
    curves = [(c, drawn) for c, drawn, _, _ in parts if drawn]
    if not curves:
        return
    at = f"at {tokens(length)} tokens"
    absent = [c.operator for c in measured if c not in timed]
    lines = textwrap.wrap(f"no time {at}, so not in this picture: {', '.join(absent)}", 190) if absent else []
    data = context.get("error_tokens", "")
    for n, why in ((2, f"see every one of the data's {data} tokens"), (3, "take longer than full softmax")):
        names = [f"{part[0].operator} ({' / '.join(row.get('label') or 'as it is' for row in part[n])})"
                 for part in parts if part[n]]
        if names:
            lines += textwrap.wrap(f"left out, as they {why}: {'; '.join(names)}", 190)
    layers = [s for s in ("", "_1") if "rel_error" + s in timed[0].at[length]]
    names = [name.strip() for name in context.get("error_data", "").split(",")] + ["", ""]
    rows = [row for _, drawn in curves for row in drawn]
    times = [row["best_ms"] for row in rows]
    errors = [row["rel_error" + s] for row in rows for s in layers]
    foot, high = 0.6 + 0.15 * len(lines), 7 + 0.15 * len(lines)  # inches
    figure = plt.figure(figsize=(12, high))
    grid = figure.add_gridspec(2, len(layers), height_ratios=(8, 1), left=0.07, right=0.985, bottom=foot / high,
                               top=1 - 1.015 / high, hspace=0.08, wspace=0.12)
    for column, suffix in enumerate(layers):
        upper, lower = figure.add_subplot(grid[0, column]), figure.add_subplot(grid[1, column])
        for axes in (upper, lower):
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlim(min(times) / 1.8, max(times) * (3 if len(layers) > 1 else 2))
            if full:
                axes.axvspan(full.at[length]["best_ms"], axes.get_xlim()[1], color="#f4f4f4", zorder=0)
        upper.set_ylim(min((e for e in errors if e > EXACT), default=0.1) / 1.5, max(2, 1.3 * max(errors)))
        lower.set_ylim(2e-8, 2e-5)
        upper.tick_params(which="both", bottom=False, labelbottom=False)
        upper.spines["bottom"].set_visible(False)
        mean = (full or timed[0]).at[length]["mean_error" + suffix]
        upper.axhline(mean, color="#999999", linewidth=1.2, linestyle=(0, (1, 1.5)), zorder=0)
        panel(upper, lower, curves, suffix, length, mean)
        upper.set_title(f"{names[column]}   ·····  baseline: mean of the values, {mean:.2f}", fontsize=10,
                        color="#666666", loc="left")
        other = f" (the data has {data})" if "own_data" in context and data != str(length) else ""
        lower.set_xlabel(f"time {at}{other}")
        if column == 0:
            upper.set_ylabel(f"relative error against full softmax, on {data} tokens")
            lower.set_ylabel("rounding\nonly")
    title(figure, heading, context)
    remark(figure, "large dot: setting of the other pictures   small: others   "
           + (f"grey: slower than full softmax {at}" if full else f"full softmax {at} was not run"))
    write_not_run(figure, lines)
    save(figure, folder, name)


def error_pictures(context, curves, folder):
    for causal in (False, True):
        error_picture(context, [c for c in curves if c.causal == causal], folder,
                      "error_causal" if causal else "error",
                      f"Error against time{', causal' * causal}: lower and further left is better")
