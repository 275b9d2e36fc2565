"""What changed in a tree of arrays: found, applied and merged in-graph, bit for bit."""

from jdelta.delta._apply import apply as apply
from jdelta.delta._delta import Delta as Delta
from jdelta.delta._delta import Group as Group
from jdelta.delta._diff import diff as diff
from jdelta.delta._merge import merge as merge
from jdelta.delta._spec import LeafSpec as LeafSpec
from jdelta.delta._spec import leaf_names as leaf_names
from jdelta.delta._words import change_words as change_words
from jdelta.delta._wrap import WrapState as WrapState
from jdelta.delta._wrap import extract as extract
from jdelta.delta._wrap import published as published
from jdelta.delta._wrap import wrap as wrap
