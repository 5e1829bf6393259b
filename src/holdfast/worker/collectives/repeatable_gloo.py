"""Gloo whose collectives are run again when a connection breaks (collective_retries.py has the rules and the order).

The methods of `Guarded`, with these differences: collectives are numbered and their inputs kept, what callers get waits
for whichever attempt at its collective succeeds, and the gloo object behind it is replaced with each retry.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import ViewOverError
from holdfast.torch_compat import PrefixStore, Store, Work
from holdfast.util.logs import get_logger
from holdfast.worker.collectives.break_watch import BreakWatch
from holdfast.worker.collectives.collective_retries import (
    AGREE_S,
    SETTLE_S,
    RetryReport,
    decide,
    retries,
)
from holdfast.worker.collectives.gloo_rest import is_at_rest
from holdfast.worker.collectives.guarded import LOOK_EVERY, Guarded, GuardedTransfer, Promise
from holdfast.worker.collectives.kept_inputs import REPEATABLE, Operation, OperationLog
from holdfast.worker.collectives.repeatable_work import Attempt, RepeatableWork, runs_of
from holdfast.worker.collectives.sockets import Mesh
from holdfast.worker.collectives.transfer_counts import TransferCounts
from holdfast.worker.collectives.waits import waits

CONNECT_S = 5.0
"""How long connecting again may take: a link that dropped may need a moment to come back."""
WAIT_S = AGREE_S + SETTLE_S + 2 * CONNECT_S
"""How long one who waits for a retry waits at most; a store that does not answer has no time limit of its own."""
NEWS_S = 0.01
"""How long nothing is done about a break. Most connections break because a process has died, of which its agent tells
within milliseconds: recovery then starts with nothing of a retry in its way."""
CALL_S_MIN, CALL_S_MAX = 0.01, 0.1
"""Between two looks whether a member wants a retry, while a connection is broken and nothing failed here."""
LOOK_S_MIN, LOOK_S_MAX = 0.001, 0.02
"""Between two looks for the reports of all."""
FORGOTTEN_S = 0.25
"""How long an operation may be under way beside a broken connection before it is taken for one that gloo forgot."""
TIMED_OUT = "imed out"
"""What gloo's error says if a peer did not come: it hangs, and no connection is broken."""

log = get_logger(__name__)


class Connected(NamedTuple):
    """A gloo object and the sockets that it communicates through."""

    guarded: Guarded
    sockets: dict[int, int]
    threads: frozenset[int] = frozenset()
    """That came with it: those that do its work, and perhaps others."""


Reconnect = Callable[[Store, Mesh, timedelta], Connected]
"""Connects the members of the group once more: a store of this attempt's own, and who is to know the sockets."""


class RetrySettings(NamedTuple):
    """What a group needs to retry its collectives."""

    limit: int
    rank: int
    size: int
    store: Store
    """That of the group in this view."""
    mesh: Mesh
    name: str


class RepeatableGloo:
    """The communicator of one group in one view."""

    def __init__(self, connected: Connected, reconnect: Reconnect, settings: RetrySettings) -> None:
        self._settings, self._reconnect = settings, reconnect
        self._changed = threading.Condition()
        """Its lock guards all that follows."""
        self._guarded = connected.guarded
        self._sockets, self._threads = connected.sockets, connected.threads
        self._log = OperationLog(settings.rank)
        self._transfers = TransferCounts()
        self._open: set[Promise] = set()
        self._handles: weakref.WeakValueDictionary[Operation, RepeatableWork] = weakref.WeakValueDictionary()
        """What the caller holds of an operation, as long as it does."""
        self._number = 0
        """Of the retry that connected it last; 0: none."""
        self._in_a_row = 0
        self._succeeded_in = 0
        """The newest retry after which an operation has succeeded."""
        self._is_retrying = False
        self._is_wanted = False
        self._refusal = ""
        self._is_broken_for_good = False
        self._over: str | None = None
        self._half_made: Mesh | None = None
        self._timeout: timedelta | None = None
        self._watch = BreakWatch(self._sockets, settings.size - 1)
        settings.mesh.exchange({}, self._watch.copies)
        threading.Thread(target=self._run, name=f"holdfast-retry-{settings.name}", daemon=True).start()

    # What callers do

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._guarded, name)
        if name in REPEATABLE:
            return lambda *arguments, **named: self._begin(name, arguments, named)
        if name in ("send", "recv"):
            return lambda *arguments, **named: self._transfer(name, arguments, named)
        if name == "recv_anysource":
            self._refuse("a receive from any rank was made, of which it is not known what it has received")
        return method

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of each collective."""
        with self._changed:
            self._timeout = timeout
            self._guarded.set_timeout(timeout)

    def check(self) -> None:
        """Raise ViewOverError once the view is over."""
        if self._over is not None:
            raise ViewOverError(self._over)

    def _begin(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Work:
        with self._changed:
            self._wait_while_retrying()
            self._sweep()
            operation = self._log.begin(name, arguments, named)
            try:
                operation.attempt = Attempt(self._guarded, self._guarded.begin(name, arguments, named), self._number)
            except RuntimeError as error:
                if self._refusal or not self._watch.is_broken():
                    self._log.withdraw(operation)
                    raise
                operation.attempt = Attempt(self._guarded, None, self._number, error.with_traceback(None))
            except BaseException:
                self._log.withdraw(operation)
                raise
            work = RepeatableWork(self, operation)
            self._handles[operation] = work
            return work

    def _transfer(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Work:
        with self._changed:
            self._wait_while_retrying()
            work: GuardedTransfer = getattr(self._guarded, name)(*arguments, **named)
            self._transfers.add(name, int(arguments[1]), work)
            return work

    def _wait_while_retrying(self) -> None:
        """With the lock held."""
        give_up_at = time.monotonic() + WAIT_S
        with waits:
            while self._is_retrying and self._over is None and not self._refusal:
                if not self._changed.wait(max(0.0, give_up_at - time.monotonic())):
                    self._refuse(f"it was not done within {WAIT_S:g} s")
        self.check()

    def wait_for(self, operation: Operation) -> None:
        """Return when the operation has succeeded, in whichever attempt; raise if there is no further one."""
        while True:
            self.check()
            attempt = operation.attempt
            if attempt is None:
                return  # it has succeeded
            if attempt.has_ended(LOOK_EVERY):
                if attempt.error is None:
                    self._succeeded(operation, attempt)
                    return
                self._wait_for_retry(operation, attempt)
            elif self._refusal and self._is_broken_for_good:
                raise ConnectionError(f"a connection of group {self._settings.name} broke: {self._refusal}")

    def has_ended(self, operation: Operation) -> bool:
        """Return whether the operation has succeeded, or failed for good."""
        attempt = operation.attempt
        if attempt is None:
            return True
        if not attempt.has_ended():
            return False
        return attempt.error is None or not self._want_retry(operation, attempt)

    def _sweep(self) -> None:
        """Record successes that no caller has waited for; with the lock held."""
        for operation in self._log:
            if not operation.is_complete:
                if operation.attempt is None or not operation.attempt.has_succeeded:
                    break
                self._succeeded(operation, operation.attempt)

    def promise(self, work: RepeatableWork) -> Promise:
        """Return a promise of the outcome of the work's operation."""
        promise = Promise(self._open.discard)
        operation = work.operation
        with self._changed:
            attempt, over = operation.attempt, self._over
            if attempt is not None:
                operation.promise = promise
                self._open.add(promise)
        if attempt is None:
            promise.settle([] if work.done is None else work.done.value())
        elif over is not None:
            promise.settle(ViewOverError(over))
        else:
            self._follow(operation, attempt)
        return promise

    def _follow(self, operation: Operation, attempt: Attempt) -> None:
        attempt.tell(lambda: self._ended(operation, attempt))

    def _ended(self, operation: Operation, attempt: Attempt) -> None:
        """Keep the operation's promise, or begin a retry. On a thread of gloo's."""
        attempt.has_ended()
        if attempt.error is None:
            self._succeeded(operation, attempt)
        elif not self._want_retry(operation, attempt):
            promise = operation.promise
            if promise is not None:
                promise.settle(attempt.error)

    def _succeeded(self, operation: Operation, attempt: Attempt) -> None:
        with self._changed:
            if operation.is_complete:
                return
            self._succeeded_in = max(self._succeeded_in, attempt.number)
            self._log.complete(operation)
            if (work := self._handles.pop(operation, None)) is not None:
                work.done = attempt
            promise, operation.promise, operation.attempt = operation.promise, None, None
        if promise is not None:
            promise.settle(attempt.value())

    def _wait_for_retry(self, operation: Operation, attempt: Attempt) -> None:
        """Return when there is a further attempt at the operation; raise the error of this one if there is none."""
        if not self._want_retry(operation, attempt):
            self.check()
            raise attempt.error  # type: ignore[misc]
        give_up_at = time.monotonic() + WAIT_S
        with self._changed:
            while operation.attempt is attempt:
                self.check()
                if not self._refusal and time.monotonic() > give_up_at:
                    self._refuse(f"it was not done within {WAIT_S:g} s")
                if self._refusal:
                    raise attempt.error
                self._changed.wait(give_up_at - time.monotonic())

    def _want_retry(self, operation: Operation, attempt: Attempt) -> bool:
        """Return whether there is, or will be, a further attempt, or none that is known to be impossible."""
        with self._changed:
            if operation.attempt is not attempt or self._is_retrying:
                return True
            if self._over is not None or self._refusal:
                return False
            if TIMED_OUT in str(attempt.error):
                self._refuse("a collective ran out of time, so a rank hangs")
            elif not self._watch.is_broken():
                self._refuse("a collective failed while its connections are well")
            else:
                self._is_wanted = True
                self._watch.wake()
            return not self._refusal

    # The end

    def fail(self, why: str) -> None:
        """Break every promise that is open, and all later ones: the view is over."""
        with self._changed:
            self._over = why
            broken, half_made = list(self._open), self._half_made
            self._changed.notify_all()
            self._watch.wake()
        if half_made is not None:
            half_made.shut()
        self._guarded.fail(why)
        for promise in broken:
            promise.settle(ViewOverError(why))

    def leave(self) -> None:
        """Make no retry any more: the others close their connections, and so will this rank."""
        with self._changed:
            self._over = self._over or "the group is not used any more"
            self._changed.notify_all()
            self._watch.wake()

    def release(self) -> None:
        """Release gloo's object when it is not used any more."""
        self.leave()
        self._guarded.release()

    # The thread

    def _run(self) -> None:
        while self._over is None and not self._refusal:
            self._watch.wait_for_break()
            broken_at = time.monotonic()
            try:
                if self._over is None and self._watch.is_broken():
                    store = self._wait_until_wanted(broken_at)
                    if store is not None:
                        self._retry(store, broken_at)
            except Exception as error:  # of the store, or of connecting: there will be no retry
                self._refuse(f"{type(error).__name__}: {error}".partition("\n")[0])
        self._watch.close()

    def _wait_until_wanted(self, broken_at: float) -> Store | None:
        """Return a client of the view's store when a member wants a retry; None if the view is over."""
        store = None if self._is_over_within(NEWS_S) else self._own_store()
        pause_s = CALL_S_MIN
        while store is not None and self._over is None and not self._refusal:
            if self._is_wanted:
                store.set("wanted", "1")
            if self._is_wanted or store.check(["wanted"]):
                return store
            self._watch.wait_for_call(pause_s)
            pause_s = min(2 * pause_s, CALL_S_MAX)
            self._look_for_forgotten(broken_at)
        return None

    def _is_over_within(self, limit_s: float) -> bool:
        """Wait this long at most for the end of the view; return whether it has come."""
        with self._changed:
            return self._changed.wait_for(lambda: self._over is not None, limit_s)

    def _look_for_forgotten(self, broken_at: float) -> None:
        """Want a retry if an operation has failed that no caller waits for, or gloo has forgotten one."""
        with self._changed:
            open_ones = [one for one in self._log if one.attempt is not None]
            under_way = [one for one in open_ones if not one.attempt.has_ended()]
            has_failed = any(one.attempt.error is not None for one in open_ones)
            is_late = time.monotonic() > broken_at + FORGOTTEN_S
            self._is_wanted = self._is_wanted or has_failed or (bool(under_way) and is_late)

    def _own_store(self) -> Store:
        """Return a client of the view's store that no other thread waits at, with the keys of the next retry."""
        client = self._settings.store.clone()  # type: ignore[attr-defined]
        client.set_timeout(timedelta(seconds=CONNECT_S))
        self._settings.mesh.remember_stores()
        return PrefixStore(f"retry/{self._number + 1}", client)

    def _retry(self, store: Store, broken_at: float) -> None:
        settings = self._settings
        with self._changed:
            self._is_retrying = True
        try:
            self._watch.shut()
            report = self._report()
            store.set(f"report/{settings.rank}", msgspec.json.encode(report).decode())
            reports = self._reports(store)
            if reports is None:
                return
            decision = decide(reports, settings.limit)
            if decision.refusal:
                self._refuse(decision.refusal)
                return
            self._connect(store)
            count = self._repeat(decision.first, max(report.in_a_row for report in reports) + 1)
        finally:
            with self._changed:
                self._is_retrying = self._is_wanted = False
                self._changed.notify_all()
        took_s = time.monotonic() - broken_at
        log.warning(
            "collectives-retried",
            f"a connection of group {settings.name} broke with all of its processes alive: connected again, and"
            f" {count} of its collectives run again from number {decision.first} on, in {took_s:.3f} s",
        )

    def _report(self) -> RetryReport:
        """Return how far we are, once gloo does nothing any more."""
        refusal = self._refusal or self._come_to_rest()
        for operation in self._log:
            attempt = operation.attempt
            if attempt is None or not attempt.has_ended():
                continue  # it has succeeded, or gloo has forgotten it
            if attempt.error is None:
                self._succeeded(operation, attempt)
            elif TIMED_OUT in str(attempt.error):
                refusal = refusal or f"collective {operation.number} ran out of time"
        with self._changed:
            if self._transfers.are_under_way():
                refusal = refusal or "a send or a receive is under way"
            return RetryReport(
                begun=self._log.begun,
                first=self._log.first,
                oldest=self._log.oldest,
                in_a_row=0 if self._succeeded_in == self._number > 0 else self._in_a_row,
                sent=self._transfers.sent,
                received=self._transfers.received,
                refusal=refusal,
            )

    def _come_to_rest(self) -> str:
        """Return when gloo does nothing any more; why there is no waiting for that, or nothing."""
        give_up_at = time.monotonic() + SETTLE_S
        pause_s = LOOK_S_MIN
        while self._over is None:
            open_ones = [one.number for one in self._log if any(not run.has_ended() for run in runs_of(one))]
            if not open_ones or is_at_rest(self._sockets, self._threads):
                return ""
            if time.monotonic() > give_up_at:
                return f"gloo is still at collective {open_ones[0]}"
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_S_MAX)
        return ""

    def _reports(self, store: Store) -> list[RetryReport] | None:
        """Return the reports of all members, by rank; None if the view is over, or they did not come in time."""
        keys = [f"report/{rank}" for rank in range(self._settings.size)]
        give_up_at = time.monotonic() + AGREE_S
        pause_s = LOOK_S_MIN
        while self._over is None:
            if store.check(keys):
                return [msgspec.json.decode(store.get(key), type=RetryReport) for key in keys]
            if time.monotonic() > give_up_at:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                self._refuse(f"ranks {missing} of the group did not report within {AGREE_S:g} s")
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_S_MAX)
        return None

    def _connect(self, store: Store) -> None:
        """Replace gloo's object by one that is connected again."""
        settings = self._settings
        part = Mesh()
        with self._changed:
            self.check()
            self._half_made = part
        connected = self._reconnect(PrefixStore("group", store), part, timedelta(seconds=CONNECT_S))
        watch = BreakWatch(connected.sockets, settings.size - 1)
        with self._changed:
            self._half_made = None
            settings.mesh.exchange(self._sockets | self._watch.copies, connected.sockets | watch.copies)
            old, self._guarded = self._guarded, connected.guarded
            self._sockets, self._threads = connected.sockets, connected.threads
            old_watch, self._watch = self._watch, watch
            if self._timeout is not None:
                self._guarded.set_timeout(self._timeout)
            if self._over is not None:
                self._guarded.fail(self._over)
        if self._over is not None:
            part.shut(unknown=False)
        old_watch.close()
        threading.Thread(target=old.release, name="holdfast-retire", daemon=True).start()
        self.check()

    def _repeat(self, first: int, in_a_row: int) -> int:
        """Run the operations from this one on again; return how many of them had not succeeded here."""
        count = 0
        with self._changed:
            self._number += 1
            self._in_a_row = in_a_row
            for operation in self._log.from_number(first):
                arguments, named = operation.arguments()
                work = self._guarded.begin(operation.name, arguments, named)
                attempt = Attempt(self._guarded, work, self._number)
                if operation.is_complete:
                    operation.served = attempt
                else:
                    operation.attempt = attempt
                    count += 1
                    if operation.promise is not None:
                        self._follow(operation, attempt)
            retries.add(count)
        return count

    def _refuse(self, why: str) -> None:
        """Make no retry in this view any more, and let those who wait have their errors."""
        with self._changed:
            if self._refusal or self._over is not None:
                return
            self._refusal = why
            self._is_broken_for_good = self._is_retrying or self._watch.is_broken()
            unkept = [one for one in self._log if one.attempt is not None and self._is_broken_for_good]
            self._changed.notify_all()
            self._watch.wake()
        if unkept:
            log.warning(
                "collectives-not-retried",
                f"a connection of group {self._settings.name} broke, and its collectives are not run again: {why}",
            )
        text = f"a connection of group {self._settings.name} broke: {why}"
        for operation in unkept:
            promise, attempt = operation.promise, operation.attempt
            if promise is not None and attempt is not None:
                promise.settle(attempt.error or ConnectionError(text))
