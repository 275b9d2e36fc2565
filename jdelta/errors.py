"""One class per kind of mistake.

Every error jdelta raises on purpose derives from `JDeltaError`. A message names what
was wrong, where, what was expected and found, and what to do next.
"""


class JDeltaError(Exception):
    """Base of all errors raised by jdelta."""


class TreeError(JDeltaError, ValueError):
    """A tree's names, shapes or dtypes are not the ones expected.

    Raised before anything is written: by `diff`, `apply`, `extract`, `Publisher`,
    `Subscriber.restore` and the receivers.
    """


class DeltaOverflowError(JDeltaError):
    """More elements changed than the `Delta`'s capacity holds.

    Nothing is lost: the weights themselves still hold every change. Publish once with
    `params=` (a whole version is written), or use a larger `capacity`.
    """


class GapError(JDeltaError):
    """A delta does not start from what was published last.

    Readers would differ from the trainer, so it was left out and whole weights are
    needed: publish once with `params=`.
    """


class FormatError(JDeltaError, ValueError):
    """An object's bytes do not follow the format, or follow a newer one."""


class CorruptError(FormatError):
    """An object's bytes do not match the size, hash or digest its manifest promises."""


class StateMismatchError(JDeltaError):
    """The weights in hand are not the ones a delta was made against.

    Raised before any weight is written. Call `Subscriber.restore` for a proved copy.
    """


class RunError(JDeltaError):
    """An object belongs to another training run than the one being read or written."""


class FencedError(JDeltaError):
    """A newer publisher took over this run; this one may not commit any more."""


class PublishError(JDeltaError):
    """A background failure of a `Publisher`, surfaced at the next call and at close."""


class VersionNotFoundError(JDeltaError, LookupError):
    """The version asked for is not in the bucket, or no chain rebuilds it."""


class WaitTimeoutError(JDeltaError, TimeoutError):
    """A wait passed its deadline; the message says for whom or what it waited."""


class MissingExtraError(JDeltaError, ImportError):
    """A feature needs an optional dependency that is not installed."""


class BucketError(JDeltaError):
    """Base of the errors of a bucket's operations."""


class ObjectNotFoundError(BucketError, LookupError):
    """No object of that name."""


class ObjectExistsError(BucketError):
    """`put_if_absent` found an object of that name."""


class ObjectChangedError(BucketError):
    """`replace_if_unchanged` found another object than the one it was told of."""


class BucketDeniedError(BucketError):
    """The bucket refused: no permission, read-only, or a name it does not take."""


class BucketUnavailableError(BucketError):
    """The bucket could not be reached; the same call may succeed later."""


class BucketFullError(BucketUnavailableError):
    """The bucket, or the disk an anchor is prepared on, has no room left."""
