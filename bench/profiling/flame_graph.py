"""A flame graph as SVG: a box for each function, as wide as its share of samples, above what called it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bench.profiling.call_stacks import AREAS, KERNEL, Stack, area
from bench.reporting.svg import as_svg

_WIDTH, _ROW, _HEAD = 13, 0.22, 0.9  # inches
_LETTERS = 175  # of a box's name in the whole width
_LEAST = 0.005  # narrower boxes are left out, and so is what stands on them
# With black text on them, in the order of AREAS.
_COLOURS = (
    *("#d0d7de", "#ffab70", "#d2a8ff", "#f692ce", "#79c0ff", "#7ee787", "#ffdf5d", "#ff9a94", "#b6a999"),
)


@dataclass(slots=True)
class _Node:
    """A function as it is called by what is below it."""

    samples: int = 0
    above: dict[str, _Node] = field(default_factory=dict)


def svg(stacks: Mapping[Stack, int], title: str) -> str:
    """The picture. ValueError without samples."""
    root = _tree(stacks)
    if not root.samples:
        raise ValueError("there are no samples")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    colours = dict(zip(AREAS, _COLOURS, strict=True))
    boxes = list(_boxes(root, (), 0, root.samples))
    rows = max(len(path) for path, _, _ in boxes)
    figure = Figure(figsize=(_WIDTH, rows * _ROW + _HEAD), layout="constrained")
    figure.suptitle(f"{title}\n{root.samples:,} samples; boxes below {_LEAST:.1%} are left out")
    legend = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(
        handles=legend, loc="outside lower center", ncols=len(legend), fontsize="small", frameon=False
    )
    axes = figure.add_subplot(xlim=(0, root.samples), ylim=(0, rows))
    axes.set_axis_off()
    for path, x, samples in boxes:
        name, share, y = path[-1].removesuffix(KERNEL), samples / root.samples, len(path) - 1
        about = f"{name}: {share:.1%}"
        box = Rectangle((x, y), samples, 1, facecolor=colours[area(path)], edgecolor="white", gid=about)
        axes.add_patch(box)
        room = int(share * _LETTERS)
        if room > 3:
            text = name if len(name) <= room else f"{name[: room - 1]}…"
            written = axes.text(x + samples / 2, y + 0.5, text, fontsize=8, parse_math=False, gid=about)
            written.set(horizontalalignment="center", verticalalignment="center")
    # Browsers show titles where the pointer is.
    return re.sub(r'<g id="([^"]+%)">', r"<g><title>\1</title>", as_svg(figure, title))


def _tree(stacks: Mapping[Stack, int]) -> _Node:
    root = _Node()
    for stack, samples in stacks.items():
        node = root
        node.samples += samples
        for function in stack:
            node = node.above.setdefault(function, _Node())
            node.samples += samples
    return root


def _boxes(node: _Node, path: Stack, x: int, total: int) -> Iterator[tuple[Stack, int, int]]:
    """What is above a node, by name, and in samples where each begins and how wide it is.

    `path` is how the node was reached, `total` are all samples.
    """
    for function, above in sorted(node.above.items()):
        if above.samples / total >= _LEAST:
            here = (*path, function)
            yield here, x, above.samples
            yield from _boxes(above, here, x, total)
        x += above.samples
