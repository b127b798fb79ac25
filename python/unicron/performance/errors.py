"""The one error of this package: input that no throughput can be computed from, with the reason."""


class PerformanceError(ValueError):
    """The message names the field and what is wrong with it."""
