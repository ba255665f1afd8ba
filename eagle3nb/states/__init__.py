"""Hidden states of the target: reading the target, running it, and keeping what it computed on disk."""

import warnings

from eagle3nb.errors import UserError

# transformers imports tqdm.auto, which in a kernel without ipywidgets says so; nothing here shows a widget.
warnings.filterwarnings("ignore", message="IProgress not found")


def open_target(engine: str, folder):
    """The target in `folder`, loaded by `engine`. UserError for an engine that this version has not."""
    if engine == "transformers":
        from eagle3nb.states.hf import TransformersTarget  # torch and the weights only when they are wanted

        return TransformersTarget(folder)
    raise UserError(f"engine {engine!r} cannot extract in this version; set engine to transformers")
