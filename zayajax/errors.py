"""The one exception for a user's mistake: one sentence, no traceback; and how a run may end."""

import enum


class Exit(enum.IntEnum):
    """Exit statuses of `zayajax train`. Others are a bug's: Python's own 1, or a signal's."""

    DONE = 0
    MISTAKE = 2  # the user's: starting again would change nothing
    STALLED = 81  # the watchdog: no step for too long
    LOST = 82  # another process ended, or a message to it failed
    SUSPECT = 83  # two replicas computed different losses from the same rows
    STOPPED = 143  # by SIGTERM, after the last finished step was saved


class UserError(Exception):
    """What was wrong, where, and what to do about it, in one sentence.

    The command line prints it alone and exits with status 2; in Python it is an ordinary exception.
    """


class NotMet(UserError):
    """The processes of a run did not meet, or lost each other. A launcher may try again."""


class ReplicasDiffer(Exception):
    """Two replicas computed different losses from the same rows: something is broken."""
