"""Where decisions are kept. sqlite3 is imported in this room only."""

from holdfast.journal.sqlite import Entry, SqliteJournal, read_entries, set_aside

__all__ = ["Entry", "SqliteJournal", "read_entries", "set_aside"]
