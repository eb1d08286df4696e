"""The order of loads and stores in memory that processes share without a lock.

A writer stores data and then a word that says that the data is there. A reader loads the word and
then the data. x86 keeps both orders by itself. An aarch64 processor may make the word visible
before the data, or load the data before the word. A fence on both sides forbids that:

    writer: data, fence(), word          reader: word, fence(), data
"""

from __future__ import annotations

from _thread import allocate_lock


def fence() -> None:
    """Complete all loads and stores so far before any later one.

    Python has no instruction for it, but its locks contain the parts. Nothing moves behind the
    release of a lock or before the acquisition of one, and a processor does not make an acquisition
    before an earlier release. The lock is new, so this neither waits nor fails in a signal handler
    or in a forked child.
    """
    lock = allocate_lock()
    lock.acquire()
    lock.release()
    lock.acquire()
