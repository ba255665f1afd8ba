"""eagle3nb: train EAGLE-3 draft models in five notebooks, from tokenised JSONL to a measured acceptance length."""

__version__ = "0.1.0"
