from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from jdelta.bucket import Bucket, DirectoryBucket, MemoryBucket
from jdelta.testing import FaultyBucket


@dataclass
class Backend:
    """A fresh empty store for the conformance suite.

    `open` gives another bucket object on the same store each time it is called;
    `shared` says whether other processes reach it through `open_bucket(url)`.
    """

    open: Callable[[], Bucket]
    shared: bool


@pytest.fixture
def directory_backend(tmp_path):
    return Backend(lambda: DirectoryBucket(tmp_path / "store"), shared=True)


@pytest.fixture
def memory_backend():
    name = uuid.uuid4().hex
    yield Backend(lambda: MemoryBucket(name), shared=False)
    MemoryBucket(name).drop()


@pytest.fixture
def wrapped_backend(memory_backend):
    return Backend(lambda: FaultyBucket(memory_backend.open()), shared=False)


# A new backend adds its fixture above and its name here.
@pytest.fixture(params=["directory", "memory", "wrapped"])
def backend(request) -> Backend:
    return request.getfixturevalue(f"{request.param}_backend")


@pytest.fixture
def bucket(backend) -> Bucket:
    return backend.open()
