"""Draw a flame graph as SVG: a box for each function, above its caller, as wide as its share of samples."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bench.profiling.call_stacks import AREAS, KERNEL_SUFFIX, CallStack, classify_stack
from bench.reporting.charts import as_svg

_WIDTH_INCHES, _ROW_HEIGHT_INCHES, _HEADER_HEIGHT_INCHES = 13, 0.22, 0.9
_LETTERS_PER_WIDTH = 175  # letters that fit into a box of the full width
_MIN_SHARE = 0.005  # narrower boxes and the functions they call are left out
# Background colors for black text, in the order of AREAS.
_COLOUR_BY_AREA = (
    *("#d0d7de", "#ffab70", "#d2a8ff", "#f692ce", "#79c0ff", "#7ee787", "#ffdf5d", "#ff9a94", "#b6a999"),
)


@dataclass(slots=True)
class _CallTreeNode:
    samples: int = 0
    callees: dict[str, _CallTreeNode] = field(default_factory=dict)


def flame_graph_svg(stacks: Mapping[CallStack, int], title: str) -> str:
    """Return the flame graph. Raises ValueError without samples."""
    root = _build_call_tree(stacks)
    if not root.samples:
        raise ValueError("there are no samples")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    colours = dict(zip(AREAS, _COLOUR_BY_AREA, strict=True))
    boxes = list(_boxes(root, (), 0, root.samples))
    rows = max(len(path) for path, _, _ in boxes)
    figure = Figure(
        figsize=(_WIDTH_INCHES, rows * _ROW_HEIGHT_INCHES + _HEADER_HEIGHT_INCHES), layout="constrained"
    )
    figure.suptitle(f"{title}\n{root.samples:,} samples; boxes below {_MIN_SHARE:.1%} are left out")
    legend = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(
        handles=legend, loc="outside lower center", ncols=len(legend), fontsize="small", frameon=False
    )
    axes = figure.add_subplot(xlim=(0, root.samples), ylim=(0, rows))
    axes.set_axis_off()
    for path, x, samples in boxes:
        name, share, y = path[-1].removesuffix(KERNEL_SUFFIX), samples / root.samples, len(path) - 1
        tooltip = f"{name}: {share:.1%}"
        box = Rectangle(
            (x, y), samples, 1, facecolor=colours[classify_stack(path)], edgecolor="white", gid=tooltip
        )
        axes.add_patch(box)
        room = int(share * _LETTERS_PER_WIDTH)
        if room > 3:
            text = name if len(name) <= room else f"{name[: room - 1]}…"
            label = axes.text(x + samples / 2, y + 0.5, text, fontsize=8, parse_math=False, gid=tooltip)
            label.set(horizontalalignment="center", verticalalignment="center")
    # Browsers show a title as a tooltip.
    return re.sub(r'<g id="([^"]+%)">', r"<g><title>\1</title>", as_svg(figure, title))


def _build_call_tree(stacks: Mapping[CallStack, int]) -> _CallTreeNode:
    root = _CallTreeNode()
    for stack, samples in stacks.items():
        node = root
        node.samples += samples
        for function in stack:
            node = node.callees.setdefault(function, _CallTreeNode())
            node.samples += samples
    return root


def _boxes(node: _CallTreeNode, path: CallStack, x: int, total: int) -> Iterator[tuple[CallStack, int, int]]:
    """Yield the call path, start and width of each box above a node; start and width are in samples.

    `path`: the node's own call path; `x`: its start; `total`: number of all samples.
    """
    for function, callee in sorted(node.callees.items()):
        if callee.samples / total >= _MIN_SHARE:
            callee_path = (*path, function)
            yield callee_path, x, callee.samples
            yield from _boxes(callee, callee_path, x, total)
        x += callee.samples
