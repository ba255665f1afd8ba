"""Acceptance length: the target's own answers, the offline walk over them, and a real decode that counts the same."""
