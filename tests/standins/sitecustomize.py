"""Python runs this at the start of every process that has this folder on PYTHONPATH: the engine's too.

PyPI's torchvision brings operators that were built for CUDA; beside a CPU build of torch they do not load, and
torchvision then fails as it describes two of them. Here the two are declared, though not implemented, just before
torchvision is imported. No image is seen in these tests.
"""

import importlib.abc
import sys

OPERATORS = ("nms", "qnms")
declared = []


class Declare(importlib.abc.MetaPathFinder):
    """Finds nothing; sees the first import of torchvision pass."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and not declared:
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            declared.append(library)  # kept: it would take its declarations along


sys.meta_path.insert(0, Declare())
