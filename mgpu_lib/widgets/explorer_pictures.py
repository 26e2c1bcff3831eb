"""The explorers' pictures for pages without JavaScript. The scripts draw the same, with more beside it."""

import math

from .base import rect, text
from .recorded import cell, numbers

LEVELS = (2000, 4000, 6000, 7000, 7700, 8200, 8500, 8800, 9000, 9200)  # 0.01 %: from here on the next darker colour
DARKEST, LIGHT = (0, 91, 148), 8  # from colour 8 on, words on it are light
RULE, BAND, LINE, ALARM, QUIET = "#b3261e", "#b8d8ec", "#0072b2", "#b3261e", "#8a919c"


def heat_map(figure):
    """(elements, height): final accuracies, the chosen cell, and the two rules through it."""
    net = figure.net()
    rates = sorted({lr for row in net["rates"] for lr in row})
    wide, high, left, top = 290 / len(net["batch_sizes"]), 23, 62, 36
    bottom = top + high * len(rates)

    def y_of(lr):
        return bottom - high * (1 + place(lr, rates))

    words = f"{figure.net_name()}: accuracy after {figure.amount(figure.cell().end)}"
    elements = [text(8, 22, words.partition(" (")[0] + ", in %", weight=600)]
    elements += [text(left - 6, y_of(lr) + 17, f"{lr:g}", "end") for lr in rates]
    squares, numbers = [], []
    for column, (b, row) in enumerate(zip(net["batch_sizes"], net["rates"])):
        x = left + wide * column
        for lr in row:
            there = cell(net, b, lr, figure.budget)
            squares.append(rect(x + 0.5, y_of(lr) + 0.5, wide - 1, high - 1, color(there), QUIET))
            numbers.append(number(there, x + wide / 2, y_of(lr)))
        elements.append(text(x + wide / 2, bottom + 18, b, "middle"))
    rules = [rule(net, figure, power, y_of, (left, top, wide, high * len(rates))) for power in (1, 0.5)]
    here = left + wide * net["batch_sizes"].index(figure.batch_size), y_of(figure.lr), wide, high
    elements += [*squares, *rules, *numbers, outline(*here)]
    elements += [
        text(8, bottom + 42, "Batch size to the right, learning rate upwards."),
        text(8, bottom + 60, "Line: linear rule; dashed: square-root rule. ×: diverged."),
    ]
    return elements, bottom + 72


def level(there):
    """Which of eleven colours a cell has."""
    return sum(sum(there.finals) >= limit * len(there.finals) for limit in LEVELS) if there.finals else 0


def color(there):
    return "#" + "".join(f"{round(255 + (end - 255) * level(there) / 10):02x}" for end in DARKEST)


def number(there, x, y):
    """A cell's number on a plate, so that it can be read where a line goes through it."""
    words = f"{there.rounded(100)}{'×' * bool(there.diverged)}" if there.finals else "×"
    wide = 8 * len(words) + 2
    number = text(x, y + 17, words, "middle").replace("#1b1f24", "#fff" if level(there) >= LIGHT else "#1b1f24")
    return rect(x - wide / 2, y + 5, wide, 14, color(there)) + number


def rule(net, figure, power, y_of, box):
    """The rates lr · (batch / chosen batch) ^ power as a line through the columns, cut off at the map's edge."""
    left, top, wide, high = box
    ys = [y_of(figure.lr * (b / figure.batch_size) ** power) - top + 11.5 for b in net["batch_sizes"]]
    points = " ".join(f"{wide * (column + 0.5):.1f},{y:.1f}" for column, y in enumerate(ys))
    dash = "" if power == 1 else ' stroke-dasharray="6 4"'
    line = f'points="{points}" fill="none"'
    return (
        f'<svg x="{left}" y="{top}" width="{wide * len(net["batch_sizes"]):.1f}" height="{high}">'
        f'<polyline {line} stroke="#fff" stroke-width="4"/>'
        f'<polyline {line} stroke="{RULE}" stroke-width="2"{dash}/></svg>'
    )


def outline(x, y, wide, high):
    return (
        f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{wide - 2:.1f}" height="{high - 2}" fill="none" '
        'stroke="#1b1f24" stroke-width="3"/>'
    )


def place(lr, rates):
    """Where `lr` lies among ascending `rates`: 0 for the first; between them, and beyond, by ratio."""
    if len(rates) == 1:
        return math.log(lr / rates[0])
    i = min(max(sum(other <= lr for other in rates) - 1, 0), len(rates) - 2)
    return i + math.log(lr / rates[i]) / math.log(rates[i + 1] / rates[i])


def curves(figure):
    """(elements, height): accuracy over the epochs, the mean of the seeds and their spread."""
    net = figure.net()
    row = net["batch_sizes"].index(figure.batch_size)
    runs = net["runs"][row][net["rates"][row].index(figure.lr)]
    marks, end = net["marks"][row], figure.cell().end
    accuracies = [numbers(run.partition("|")[0]) for run in runs]
    sound = [curve for curve in accuracies if len(curve) == len(marks)]
    left, right, top, bottom = 52, 348, 36, 206

    def at(mark, accuracy):
        share = math.log(0.95 / max(0.05, min(0.95, 1 - accuracy / 10_000))) / math.log(19)
        return f"{left + (right - left) * mark / end:.1f},{bottom - (bottom - top) * share:.1f}"

    elements = [text(8, 22, f"{figure.net_name()}, batch {figure.batch_size}, learning rate {figure.lr:g}", weight=600)]
    for percent in (10, 50, 80, 90, 95):
        y = float(at(0, 100 * percent).partition(",")[2])
        elements += [rect(left, y, right - left, 0.8, QUIET), text(left - 6, y + 5, f"{percent}%", "end")]
    if sound:
        highs, lows, means = ([f(column) for column in zip(*sound)] for f in (max, min, lambda c: sum(c) / len(c)))
        around = [*map(at, marks, highs), *reversed([*map(at, marks, lows)])]
        elements += [
            f'<polygon points="{" ".join(around)}" fill="{BAND}"/>',
            f'<polyline points="{" ".join(map(at, marks, means))}" fill="none" stroke="{LINE}" stroke-width="4"/>',
        ]
    for curve in accuracies:
        if len(curve) < len(marks) and curve:
            elements += [
                f'<polyline points="{" ".join(map(at, marks, curve))}" fill="none" stroke="{ALARM}"/>',
                cross(at(marks[len(curve) - 1], curve[-1])),
            ]
    return [*elements, text(left, bottom + 24, "0"), text(right, bottom + 24, figure.amount(end), "end")], bottom + 36


def cross(point):
    x, y = map(float, point.split(","))
    return text(x, y + 5, "×", "middle", 600)
