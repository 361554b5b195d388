"""The one exception for a user's mistake: one sentence, no traceback."""


class UserError(Exception):
    """What was wrong, where, and what to do about it, in one sentence.

    The command line prints it alone and exits with status 2; in Python it is an ordinary exception.
    """
