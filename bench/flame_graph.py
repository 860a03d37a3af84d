"""A flame graph as SVG: a box for each function, as wide as its share of samples, above what called it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from bench.drawing import fitted, render
from bench.stacks import AREAS, KERNEL, Stack, area

_WIDTH, _MARGIN, _ROW, _TOP, _FOOT = 1000, 10, 17, 48, 12
_LETTER = 6.7  # the mean width of a letter of 11 pixels
_SQUARE = 26  # a sample of a colour in the legend, with the gaps around it
_LEAST = 0.005  # narrower boxes are left out, and so is what stands on them


@dataclass(slots=True)
class _Node:
    """A function as it is called by what is below it."""

    samples: int = 0
    above: dict[str, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Box:
    """A function in the picture. `colour` is the index of its area in AREAS."""

    x: float
    width: float
    depth: int
    text: str
    about: str
    colour: int


def svg(stacks: Mapping[Stack, int], title: str) -> str:
    """The picture. ValueError without samples."""
    root = _tree(stacks)
    if not root.samples:
        raise ValueError("there are no samples")
    boxes = list(_boxes(root, (), 0.0, _WIDTH - 2 * _MARGIN, root.samples))
    rows = 1 + max(box.depth for box in boxes)
    return render(
        "flames.svg.j2",
        title=title,
        about=f"{root.samples:,} samples; boxes below {_LEAST:.1%} are left out",
        width=_WIDTH,
        height=_TOP + rows * _ROW + _FOOT,
        floor=_TOP + (rows - 1) * _ROW,
        row=_ROW,
        margin=_MARGIN,
        legend=_legend(),
        boxes=boxes,
    )


def _legend() -> list[tuple[int, str]]:
    """Each area, and where its name begins."""
    places = accumulate((_SQUARE + round(len(name) * _LETTER) for name in AREAS), initial=_MARGIN)
    return list(zip(places, AREAS, strict=False))  # behind the last one is a place, but no name


def _tree(stacks: Mapping[Stack, int]) -> _Node:
    root = _Node()
    for stack, samples in stacks.items():
        node = root
        node.samples += samples
        for function in stack:
            node = node.above.setdefault(function, _Node())
            node.samples += samples
    return root


def _boxes(node: _Node, path: Stack, x: float, width: float, total: int) -> Iterator[_Box]:
    """The boxes above a node, by name; `path` is how it was reached, `total` are all samples."""
    for function, above in sorted(node.above.items()):
        share, here = above.samples / total, (*path, function)
        wide = width * above.samples / node.samples
        if share >= _LEAST:
            name = function.removesuffix(KERNEL)
            text = fitted(name, wide - 6, _LETTER)
            yield _Box(x, wide, len(path), text, f"{name}: {share:.1%}", AREAS.index(area(here)))
            yield from _boxes(above, here, x, wide, total)
        x += wide
