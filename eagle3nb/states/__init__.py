"""Hidden states of the target: reading the target, running it, and keeping what it computed on disk."""

import warnings

from eagle3nb.errors import UserError

# transformers imports tqdm.auto, which in a kernel without ipywidgets says so; nothing here shows a widget.
warnings.filterwarnings("ignore", message="IProgress not found")


def open_target(engine: str, folder, *, tensor_parallel: int = 1, engine_args=()):
    """The target in `folder`, loaded by `engine`. UserError for an engine or an option that this version has not.

    tensor_parallel: devices that SGLang divides the target among; engine_args: more of its arguments, "name=value".
    """
    if engine == "sglang":
        from eagle3nb.states.sglang import SGLangTarget  # a process of its own: nothing of SGLang is imported here

        return SGLangTarget(folder, tensor_parallel=tensor_parallel, engine_args=engine_args)
    if engine != "transformers":
        raise UserError(f"engine {engine!r} is unknown; choose transformers or sglang")
    if tensor_parallel != 1 or engine_args:
        raise UserError("tensor_parallel and engine_args are for engine sglang; leave them out, or set engine to it")
    from eagle3nb.states.hf import TransformersTarget  # torch and the weights only when they are wanted

    return TransformersTarget(folder)
