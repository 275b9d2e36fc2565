"""Names, and what is refused with which words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdelta.delta import apply, change_words, diff, leaf_names, merge
from jdelta.delta._layout import Limits, group_layouts
from jdelta.delta._spec import LeafSpec
from jdelta.errors import TreeError

nnx = pytest.importorskip("flax.nnx")

TINY = Limits(
    small=64, block=256, batch=3, piece=300, group=1000, sweep=6, slots=64, slot_floor=1
)


def test_leaf_names():
    tree = {"layers": [{"kernel": 1, "bias": 2}, {"kernel": 3}], "scale": 4}
    assert leaf_names(tree) == (
        "layers.0.bias",
        "layers.0.kernel",
        "layers.1.kernel",
        "scale",
    )
    assert leaf_names(jnp.zeros(3)) == ("",)


def test_leaf_names_of_nnx_state_are_those_of_the_pure_dict():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs) for _ in range(2)])

    state = nnx.state(Model(nnx.Rngs(0)), nnx.Param)
    want = ("layers.0.bias", "layers.0.kernel", "layers.1.bias", "layers.1.kernel")
    assert leaf_names(state) == want
    assert leaf_names(nnx.to_pure_dict(state)) == want


def test_duplicate_names_are_refused():
    tree = {"a": {"b": jnp.zeros(1)}, "a.b": jnp.zeros(1)}
    with pytest.raises(TreeError, match=r"'a\.b'.*\['a'\]\['b'\].*\['a\.b'\]"):
        leaf_names(tree)
    with pytest.raises(TreeError, match="rename"):
        diff(tree, tree)


OTHERS = {
    "missing": ({"a": jnp.zeros(2)}, "'b' is missing"),
    "extra": (
        {"a": jnp.zeros(2), "b": jnp.zeros(3), "c": jnp.zeros(1)},
        "'c' was not expected",
    ),
    "shape": (
        {"a": jnp.zeros(2), "b": jnp.zeros((3, 1))},
        r"'b': expected shape \(3,\), got \(3, 1\)",
    ),
    "dtype": (
        {"a": jnp.zeros(2), "b": jnp.zeros(3, jnp.int32)},
        "'b': expected dtype float32, got int32",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_trees_are_refused(kind):
    tree = {"a": jnp.zeros(2), "b": jnp.zeros(3)}
    other, message = OTHERS[kind]
    delta = diff(tree, tree)
    with pytest.raises(TreeError, match=message):
        diff(tree, other)
    with pytest.raises(TreeError, match=message):
        change_words(tree, other)
    with pytest.raises(TreeError, match=message):
        apply(other, delta)
    with pytest.raises(TreeError, match=message):
        merge(delta, diff(other, other))


BAD = {
    "string": "text",
    "number": 1.0,
    "object": object(),
    "complex": jnp.zeros(2, jnp.complex64),
    "int4": jnp.zeros(2, jnp.int4),
    "uint4": jnp.zeros(2, jnp.uint4),
    "key": jax.random.key(0),
    "float64": np.zeros(2),
    "abstract": jax.ShapeDtypeStruct((2,), jnp.float32),
    "float4": jnp.zeros(2, jnp.float4_e2m1fn),
}


@pytest.mark.parametrize("kind", BAD)
def test_leaves_without_bits_are_refused_by_name(kind):
    tree = {"fine": jnp.zeros(2), "bad": BAD[kind]}
    with pytest.raises(TreeError, match="'bad'"):
        diff(tree, tree)


def spec(size: int, width: int = 1) -> LeafSpec:
    return LeafSpec("huge", (size,), f"uint{8 * width}")


def test_sizes_beyond_one_group_or_one_piece_are_cut():
    prime = 2**31 + 11
    specs = (spec(2**31), LeafSpec("prime", (prime,), "int8"), spec(2**33, 2))
    layouts = group_layouts(specs)
    assert all(layout.size <= 2**31 for layout in layouts)
    for i, leaf in enumerate(specs):
        parts = [s for layout in layouts for s in layout.segments if s.leaf == i]
        assert all(part.size <= 2**30 for part in parts)
        end = 0
        for part in parts:
            assert part.offset == end
            end += part.size
        assert end == leaf.size


def test_layout_covers_every_element_once():
    limits = TINY._replace(small=50)
    sizes = [3, 700, 0, 49, 50, 1, 1200, 299, 600, 40]
    specs = tuple(LeafSpec(str(i), (n,), "int8") for i, n in enumerate(sizes))
    layouts = group_layouts(specs, limits)
    assert len(layouts) > 1
    covered = np.zeros((len(sizes), max(sizes)), int)
    for layout in layouts:
        end = 0
        for segment in layout.segments:
            assert segment.start == end
            end += segment.size
            covered[segment.leaf, segment.offset : segment.offset + segment.size] += 1
        assert end == layout.size <= limits.group
        assert all(sum(s.size for s in batch) <= 256 for batch in layout.batches)
        assert all(piece.size <= 300 for piece in layout.pieces)
    assert all((covered[i, :n] == 1).all() for i, n in enumerate(sizes))
    assert covered.sum() == sum(sizes)
