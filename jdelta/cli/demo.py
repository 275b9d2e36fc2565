"""`jdelta demo`: a trainer and two followers, in processes of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jdelta.cli._shared import (
    Debug,
    Json,
    command,
    human_bytes,
    print_json,
)
from jdelta.errors import JDeltaError, MissingExtraError, ObjectNotFoundError

if TYPE_CHECKING:
    from rich.console import Console

    from jdelta.cli._demo.board import Board
    from jdelta.cli._demo.channel import Settings
    from jdelta.cli._demo.children import Children

_REFRESH = 0.25  # seconds between two drawings of the live table
_PLAIN_REFRESH = 5.0  # the same where nothing can be redrawn
_SILENCE = 300.0  # seconds without a word from any child that count as a failure


@command
def demo(
    bucket: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="An empty bucket to stream over; default: a temporary directory.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Fine-tuning steps; each is published.")
    ] = 120,
    lr: Annotated[
        float, typer.Option(min=0.0, help="Learning rate of the fine-tuning (AdamW).")
    ] = 3e-6,
    pretrain_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long to train before the stream starts.")
    ] = 60.0,
    keep: Annotated[
        bool, typer.Option("--keep", help="Do not remove the temporary directory.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a small transformer and follow its weights elsewhere, bit for bit.

    A trainer pretrains a byte-level transformer on Python's standard library, then
    fine-tunes it and publishes every step. A JAX and a PyTorch follower (NumPy without
    PyTorch) hold its weights meanwhile. At the end each proves that it holds exactly
    what the trainer has, and the bucket is rebuilt and proved from cold.
    """
    from rich.console import Console

    from jdelta.cli._demo.channel import Settings

    begin = time.perf_counter()
    _require("jax", "flax", "optax")
    # Nothing but the JSON line may be on standard output under --json.
    console = Console(stderr=as_json, highlight=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_signals_interrupt())
        url = bucket or _temporary(stack, keep)
        _check_empty(url)
        if bucket or keep:
            console.print(f"bucket: {url}", soft_wrap=True)
        settings = Settings(
            bucket=url,
            steps=steps,
            learning_rate=lr,
            pretrain_seconds=pretrain_seconds,
        )
        board = _run(settings, console)
        report = _conclude(settings, board)
        report["times"]["total_s"] = time.perf_counter() - begin
    _print_summary(console, report)
    if as_json:
        print_json(report)
    if not all(follower["equal"] for follower in report["followers"]):
        raise JDeltaError(
            "a follower did not hold the trainer's weights bit for bit: "
            + ", ".join(f["kind"] for f in report["followers"] if not f["equal"])
        )


def _require(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"the demo trains a model and needs {', '.join(missing)}: "
            "pip install 'jdelta[jax]'"
        )


def _temporary(stack: contextlib.ExitStack, keep: bool) -> str:
    prefix = "jdelta-demo-"
    if keep:
        return tempfile.mkdtemp(prefix=prefix)
    return stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix))


def _check_empty(url: str) -> None:
    """Refuse a bucket that other processes cannot see or that holds a run already."""
    from jdelta.bucket import open_bucket
    from jdelta.wire import names

    if url.startswith("memory:"):
        raise JDeltaError(
            f"{url}: the demo's processes cannot share memory; give a directory or "
            "another bucket's URL"
        )
    try:
        open_bucket(url).stat(names.RUN)
    except ObjectNotFoundError:
        return
    raise JDeltaError(
        f"{url} already holds a run; the demo needs an empty bucket of its own"
    )


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the command as cleanly as Ctrl-C does."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _run(settings: Settings, console: Console) -> Board:
    """Run the processes to their end, showing the live table."""
    from rich.live import Live

    from jdelta.cli._demo.board import Board
    from jdelta.cli._demo.children import Children

    torch = importlib.util.find_spec("torch") is not None
    kinds = ["jax", "torch" if torch else "numpy"]
    board = Board(settings, kinds)
    with contextlib.ExitStack() as stack:
        children = stack.enter_context(Children())
        text = settings.to_json()
        children.start("trainer", "jdelta.cli._demo.trainer", [text])
        for kind in kinds:
            children.start(
                kind,
                "jdelta.cli._demo.follower",
                [kind, text],
                JAX_PLATFORMS="cpu",
                OMP_NUM_THREADS="1",
            )
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
            for _ in _watch(children, board, _REFRESH):
                live.update(board.table(), refresh=True)
        else:
            for _ in _watch(children, board, _PLAIN_REFRESH):
                console.print(board.line(), soft_wrap=True)
            console.print(board.table())
    return board


def _watch(children: Children, board: Board, refresh: float) -> Iterator[None]:
    """Feed the board until every child has ended; yields when it may be drawn.

    Raises:
        JDeltaError: A child died, or none has said anything for long.
    """
    left = {"trainer", *board.followers}
    heard = drawn = time.monotonic()
    while left:
        now = time.monotonic()
        if now - drawn >= refresh:
            drawn = now
            yield
        try:
            child, event, fields = children.events.get(timeout=_REFRESH)
        except queue.Empty:
            if time.monotonic() - heard > _SILENCE:
                raise JDeltaError(
                    f"no process said anything for {_SILENCE:.0f} s; still running: "
                    + ", ".join(sorted(left))
                ) from None
            continue
        heard = time.monotonic()
        if event is not None:
            board.take(child, event, fields)
            continue
        children.check_exit(child)
        if not board.ended(child):
            raise JDeltaError(f"the {child} process ended before its work was done")
        left.discard(child)
    yield


def _conclude(settings: Settings, board: Board) -> dict[str, Any]:
    """Prove the bucket from cold and put the figures together."""
    from collections import Counter

    import jdelta
    from jdelta.cli._demo.counting import kind
    from jdelta.cli._demo.truth import sha256

    bucket = jdelta.open_bucket(settings.bucket)
    report = board.report()
    begin = time.perf_counter()
    weights, manifest = jdelta.load(bucket)
    report["times"]["verify_s"] = time.perf_counter() - begin
    if manifest.version + 1 != report["versions"]:
        raise JDeltaError(
            f"the bucket's newest version is {manifest.version}, the trainer committed "
            f"{report['versions'] - 1}"
        )
    if sha256(weights) != board.truths[settings.steps]:
        raise JDeltaError("the bucket rebuilds to other weights than the trainer's")
    report["verified"] = True
    stored: Counter[str] = Counter()
    for info in bucket.list(""):
        stored[kind(info.name)] += info.size
    for name, size in stored.items():
        if size > report["written"].get(name, 0):
            raise JDeltaError(
                f"the bucket holds {size} bytes of {name}, only "
                f"{report['written'].get(name, 0)} were counted"
            )
    report["stored"] = dict(stored)
    return report


def _print_summary(console: Console, report: dict[str, Any]) -> None:
    written, full = sum(report["written"].values()), report["full_bytes"]
    density, times = report["density"], report["times"]
    kinds = ", ".join(
        f"{name} {human_bytes(size)}" for name, size in report["written"].items()
    )
    console.print(
        f"\n{report['versions']} versions of {human_bytes(full)} "
        f"({report['parameters']:,} bf16 weights); density {density['mean']:.2%} "
        f"(first {density['first']:.2%}, last {density['last']:.2%})"
    )
    console.print(f"written: {human_bytes(written)} ({kinds})")
    for follower in report["followers"]:
        state = "equal" if follower["equal"] else "NOT EQUAL"
        console.print(
            f"{follower['kind']} follower: {state} at version {follower['version']} "
            f"({follower['versions_compared']} versions compared by SHA-256)"
        )
    console.print(
        f"bucket: version {report['versions'] - 1} rebuilt from cold and proved in "
        f"{times['verify_s']:.1f} s"
    )
    console.print(
        f"publish() {times['publish_ms']['median']:.2f} ms, step "
        f"{times['step_ms']['median']:.0f} ms (medians); {times['total_s']:.0f} s "
        "in all"
    )
    console.print(f"[bold]saved {report['saved_fraction']:.2%}[/bold] of the bytes")
