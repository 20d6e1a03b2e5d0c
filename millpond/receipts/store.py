"""The file: one SQLite database in WAL mode. Knows tables, the chain and retention; no events, no threads.

begins(sequence of a run, when)  ends(number, ..., body, previous, hash)  marks(name, value)

Rows of `ends` are never changed. Retention takes the oldest away and remembers the hash of the last one it took: the
chain then begins there.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from millpond.errors import ConfigError
from millpond.receipts.receipt import GENESIS, chain_hash

_SCHEMA = """
CREATE TABLE IF NOT EXISTS begins (
    run TEXT NOT NULL, sequence INTEGER NOT NULL, request_id TEXT NOT NULL, accepted_at REAL NOT NULL,
    prompt_tokens INTEGER NOT NULL, PRIMARY KEY (run, sequence)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ends (
    number INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL, sequence INTEGER NOT NULL, request_id TEXT NOT NULL,
    ended_at REAL NOT NULL, body BLOB NOT NULL, previous TEXT NOT NULL, hash TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS ends_by_request ON ends (request_id);
CREATE TABLE IF NOT EXISTS marks (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
BUSY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Begin:
    run: str
    sequence: int
    request_id: str
    accepted_at: float
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class EndRow:
    """As stored; `body` is a receipt's canonical bytes."""

    number: int
    run: str
    sequence: int
    request_id: str
    ended_at: float
    body: bytes
    previous: str
    hash: str


@dataclass(frozen=True, slots=True)
class NewEnd:
    run: str
    sequence: int
    request_id: str
    ended_at: float
    body: bytes


class ReceiptStore:
    """One connection, for one thread at a time. All raise sqlite3.Error when the file cannot be read or written."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    @classmethod
    def open(cls, path: Path, *, create: bool) -> ReceiptStore:
        """Raises ConfigError when there is no such file (or none can be made), or it is not one of receipts."""
        try:
            mode = "rwc" if create else "ro"
            address = f"{path.absolute().as_uri()}?mode={mode}"
            db = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            if create:
                db.execute("PRAGMA auto_vacuum=INCREMENTAL")
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=NORMAL")
                db.executescript(_SCHEMA)
            db.execute("SELECT count(*) FROM marks").fetchone()
        except sqlite3.Error as error:
            raise ConfigError("receipts", f"{path} cannot be used: {error}") from None
        return cls(db)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Generator[None]:
        """All of the block or nothing; no other process writes meanwhile."""
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            yield

    def add_begin(self, begin: Begin) -> None:
        values = (begin.run, begin.sequence, begin.request_id, begin.accepted_at, begin.prompt_tokens)
        self._db.execute("INSERT OR IGNORE INTO begins VALUES (?, ?, ?, ?, ?)", values)

    def add_ends(self, ends: Sequence[NewEnd]) -> None:
        """Chains them to the last row; only inside `transaction`."""
        previous = self.head()
        for end in ends:
            own = chain_hash(previous, end.body)
            values = (end.run, end.sequence, end.request_id, end.ended_at, end.body, previous, own)
            self._db.execute(
                "INSERT INTO ends (run, sequence, request_id, ended_at, body, previous, hash) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                values,
            )
            self._db.execute("DELETE FROM begins WHERE run = ? AND sequence = ?", (end.run, end.sequence))
            previous = own

    def head(self) -> str:
        """Hash of the last receipt, or where the chain begins."""
        row = self._db.execute("SELECT hash FROM ends ORDER BY number DESC LIMIT 1").fetchone()
        return str(row[0]) if row else self.anchor()

    def anchor(self) -> str:
        """What the first row that is left follows."""
        row = self._db.execute("SELECT value FROM marks WHERE name = 'anchor'").fetchone()
        return str(row[0]) if row else GENESIS

    def ends(self, *, newest: int | None = None) -> Iterator[EndRow]:
        """In order of their numbers; `newest`: only so many of the last."""
        columns = "number, run, sequence, request_id, ended_at, body, previous, hash"
        last = f"SELECT {columns} FROM ends ORDER BY number DESC LIMIT ?"
        limit = -1 if newest is None else newest
        for row in self._db.execute(f"SELECT * FROM ({last}) ORDER BY number", (limit,)):
            yield EndRow(*row)

    def find(self, wanted: str) -> list[EndRow]:
        """By number, or every output of a request id."""
        number = int(wanted) if wanted.isdigit() else -1
        columns = "number, run, sequence, request_id, ended_at, body, previous, hash"
        query = f"SELECT {columns} FROM ends WHERE number = ? OR request_id = ? ORDER BY number"
        return [EndRow(*row) for row in self._db.execute(query, (number, wanted))]

    def unfinished(self) -> list[Begin]:
        """Accepted, and no end was written: still running, lost with the server's process, or dropped."""
        return [Begin(*row) for row in self._db.execute("SELECT * FROM begins ORDER BY accepted_at")]

    def used_bytes(self) -> int:
        pages, free, size = (
            int(self._db.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def forget_before(self, when: float) -> int:
        """Takes away the oldest receipts up to the first that ended later. Returns how many."""
        row = self._db.execute("SELECT min(number) FROM ends WHERE ended_at >= ?", (when,)).fetchone()
        first_kept = row[0]
        if first_kept is None:
            first_kept = int(self._db.execute("SELECT coalesce(max(number), 0) + 1 FROM ends").fetchone()[0])
        self._db.execute("DELETE FROM begins WHERE accepted_at < ?", (when,))
        return self._forget_below(int(first_kept))

    def forget_oldest(self, share: float) -> int:
        """Takes away this share of the rows, one at least if there are any, the oldest first."""
        low, count = self._db.execute("SELECT coalesce(min(number), 0), count(*) FROM ends").fetchone()
        return self._forget_below(int(low) + max(1, int(int(count) * share))) if count else 0

    def _forget_below(self, number: int) -> int:
        row = self._db.execute(
            "SELECT hash FROM ends WHERE number < ? ORDER BY number DESC LIMIT 1", (number,)
        ).fetchone()
        if row is None:
            return 0
        self._db.execute("INSERT OR REPLACE INTO marks VALUES ('anchor', ?)", (row[0],))
        return self._db.execute("DELETE FROM ends WHERE number < ?", (number,)).rowcount

    def shrink(self) -> None:
        """Gives free pages back to the file system; outside a transaction."""
        self._db.executescript("PRAGMA incremental_vacuum;")  # execute() would step it once: one page


@contextmanager
def opened(path: Path) -> Generator[ReceiptStore]:
    """For reading. Raises ConfigError."""
    with closing(ReceiptStore.open(path, create=False)) as store:
        yield store
