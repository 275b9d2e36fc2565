from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jdelta.bucket import DirectoryBucket, MemoryBucket, open_bucket
from jdelta.errors import BucketError


def test_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    expected = {
        str(tmp_path / "a"): tmp_path / "a",
        "a": tmp_path / "a",
        "a/": tmp_path / "a",
        "./b/../a": tmp_path / "a",
        "~/a": tmp_path / "home" / "a",
        "with %20 and spaces": tmp_path / "with %20 and spaces",
        f"file://{tmp_path}/a%20b": tmp_path / "a b",
        f"FILE://localhost{tmp_path}/a": tmp_path / "a",
    }
    for url, path in expected.items():
        bucket = open_bucket(url)
        assert isinstance(bucket, DirectoryBucket)
        assert bucket.root == path
    assert open_bucket(Path("a")).url == str(tmp_path / "a")


def test_memory_buckets_of_one_name_are_one():
    open_bucket("memory://one").put("a", b"1")
    assert isinstance(open_bucket("memory://one"), MemoryBucket)
    assert open_bucket("memory://one").get("a") == b"1"
    assert list(open_bucket("memory://other").list()) == []
    open_bucket("memory://one").drop()
    assert list(open_bucket("memory://one").list()) == []


@pytest.mark.parametrize("scheme", ["hf", "s3", "gs", "az", "https", "ftp"])
def test_a_scheme_without_a_backend_says_so(scheme):
    with pytest.raises(BucketError, match=rf"no backend for {scheme}://.*memory://"):
        open_bucket(f"{scheme}://bucket/run")


@pytest.mark.parametrize(
    "url", ["", "memory://", "file://", "file:///", "file://host/a", "file://a", "a\0b"]
)
def test_a_malformed_url_is_an_error(url):
    with pytest.raises(BucketError):
        open_bucket(url)


def test_importing_it_loads_no_jax_and_no_client():
    heavy = "{'jax', 'numpy', 'torch', 'huggingface_hub'}"
    code = f"import sys, jdelta.bucket; print({heavy} & set(sys.modules))"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "set()"
