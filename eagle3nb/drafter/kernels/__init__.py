"""Triton kernels of the training step, imported only where tensors lie on a GPU (by attention.py and loss.py one level
up), by their tests and by tools/kernel_table.py. shared_memory.py alone needs no Triton.
"""
