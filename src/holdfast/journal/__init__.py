"""Storage of decisions and of what is known of machines. sqlite3 is imported in this package only."""

from holdfast.journal.machines import BOOK_NAME, MachineBook
from holdfast.journal.sqlite import (
    JournalEntry,
    SqliteJournal,
    is_abandoned,
    read_all_of,
    read_entries,
    read_newest,
    set_aside,
)

__all__ = [
    "BOOK_NAME",
    "JournalEntry",
    "MachineBook",
    "SqliteJournal",
    "is_abandoned",
    "read_all_of",
    "read_entries",
    "read_newest",
    "set_aside",
]
