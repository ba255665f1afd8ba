"""The draft model: its layer, training-time test, counting, checkpoints, export."""
