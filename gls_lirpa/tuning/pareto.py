"""Points of natural and certified accuracy, larger is better: fronts, ranks and the area they dominate."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float]


def dominates(first: Point, second: Point) -> bool:
    """At least as good in both, and better in one.

    >>> dominates((97.0, 92.0), (97.0, 91.0)), dominates((97.0, 90.0), (96.0, 91.0))
    (True, False)
    """
    return first[0] >= second[0] and first[1] >= second[1] and first != second


def front(points: Sequence[Point]) -> list[int]:
    """Indices of the points that none dominates, by natural accuracy.

    >>> front([(97.0, 90.0), (96.0, 91.0), (95.0, 90.5)])
    [1, 0]
    """
    free = [i for i, point in enumerate(points) if not any(dominates(other, point) for other in points)]
    return sorted(free, key=lambda i: points[i])


def ranked(points: Sequence[Point]) -> list[int]:
    """Indices from best to worst: front by front, and within a front by how much area a point adds to it.

    >>> ranked([(1.0, 1.0), (3.0, 1.0), (2.0, 2.0), (1.0, 3.0)])[-1]
    0
    """
    left, order = list(range(len(points))), []
    while left:
        layer = [left[i] for i in front([points[i] for i in left])]
        own = [points[i] for i in layer]
        corner = (min(p[0] for p in points), min(p[1] for p in points))
        whole = hypervolume(own, corner)
        gains = {i: whole - hypervolume([q for j, q in zip(layer, own, strict=True) if j != i], corner) for i in layer}
        order += sorted(layer, key=lambda i: (-gains[i], -points[i][1], i))
        left = [i for i in left if i not in layer]
    return order


def hypervolume(points: Sequence[Point], reference: Point) -> float:
    """The area between ``reference`` and the front: what is dominated by some point and dominates the reference.

    >>> hypervolume([(3.0, 1.0), (1.0, 2.0)], (0.0, 0.0))
    4.0
    """
    area, height = 0.0, reference[1]
    for i in reversed(front(points)):
        natural, certified = points[i]
        if certified > height and natural > reference[0]:
            area += (natural - reference[0]) * (certified - height)
            height = certified
    return area
