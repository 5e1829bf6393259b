"""Where decisions are kept, and what is known of machines. sqlite3 is imported in this room only."""

from holdfast.journal.nodes import BOOK_NAME, NodeBook
from holdfast.journal.sqlite import Entry, SqliteJournal, is_abandoned, read_entries, set_aside

__all__ = ["BOOK_NAME", "Entry", "NodeBook", "SqliteJournal", "is_abandoned", "read_entries", "set_aside"]
