"""Records: the executed notebook as report, its JSON twin, and the runner that owns the verdict."""

from eagle3nb.record.stage import Stage, start

__all__ = ["Stage", "start"]
