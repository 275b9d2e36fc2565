"""The stream: publisher, subscriber and the chain between them.

The NumPy half (`Subscriber`, `load`, a `Publisher` of NumPy trees) works without JAX.
"""

from jdelta.stream.chain import Chain as Chain
from jdelta.stream.publisher import Publisher as Publisher
from jdelta.stream.rebuild import load as load
from jdelta.stream.records import CommitRecord as CommitRecord
from jdelta.stream.records import PublisherStats as PublisherStats
from jdelta.stream.records import ReaderStats as ReaderStats
from jdelta.stream.subscriber import Subscriber as Subscriber
from jdelta.stream.update import Update as Update

__all__ = [
    "Chain",
    "CommitRecord",
    "Publisher",
    "PublisherStats",
    "ReaderStats",
    "Subscriber",
    "Update",
    "load",
]
