"""The one error that is meant for the user's eyes."""


class UserError(Exception):
    """Bad input, said in one line: what is wrong, where, and what to do. Shown without a traceback; the stage fails."""
