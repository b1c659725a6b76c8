"""Gives a sequence the retrieval heads of its model: from a file, or by a calibration behind the first answer."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import TYPE_CHECKING

from ..errors import CalibrationError, ConfigError, SnapshotError
from ..logs import Progress
from ..policy.base import Pairs, Scorer, Selective
from ..sequence.keys import key_shapes
from ..sequence.sequence import Sequence
from .known import Calibration, heads_file, load, of_llama, save

if TYPE_CHECKING:
    from llama_cpp import Llama
    from llama_cpp._internals import LlamaModel

    from .measure import Eta

logger = logging.getLogger("kvflash_ggml")

BUSY = 5.0
"""Seconds between two steps of a calibration while requests run, so that a busy server finds the heads, too."""


class HeadFinder:
    """The retrieval heads of one model. All heads count until they are known.

    llm: the one of the sequence; model: its weights. given: a file of heads (ConfigError if it does not fit), or None
    to find them. OSError or SnapshotError if the model's file cannot be read again.
    """

    def __init__(self, llm: Llama, model: LlamaModel, session: Sequence, *, given: Path | None) -> None:
        self._session = session
        self._model = model
        self._settings = llm.context_params
        self._model_id = of_llama(llm)
        self._layers = [layer.il for layer in session.engine.layers]
        self._shapes = key_shapes(session.engine)
        self._stop = Event()
        self._idle = Event()
        self._idle.set()
        self._tried = False
        self._thread: Thread | None = None
        # until Python 3.13 an interrupted `Thread.join` says of a thread that runs that it has ended
        self._ended = Event()
        self._outlived = ExitStack()  # freed by the thread at its end
        self._progress: Progress | None = None
        self._expected: float | None = None  # seconds
        self._found: Calibration | None = None
        self._used: dict[int, Calibration] = {}  # by sequence
        self._requests = 0
        self.calibration: Calibration | None = None
        if given is not None:
            self._take(self._load(given))
            return
        with suppress(ConfigError):  # no file, or a damaged one: a calibration makes it
            self._take(self._load(heads_file(self._model_id.identity)))

    @property
    def heads(self) -> Pairs | None:
        """The retrieval heads, as the policy names them; None if all heads count."""
        return None if self.calibration is None else self.calibration.among(self._layers)

    @property
    def is_finding(self) -> bool:
        return self._thread is not None and not self._ended.is_set()

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Let a request run: the calibration waits for its end, except for a step every BUSY seconds."""
        self._requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._idle.set()

    def start(self, *, again: bool = False) -> None:
        """Begin to find the heads on a thread, unless they are known. again: also after a failure."""
        tried, self._tried = self._tried, True
        if self.calibration is not None or self.is_finding or self._stop.is_set() or (tried and not again):
            return
        thread = Thread(target=self._run, name="kvflash-calibrate", daemon=True)
        self._ended.clear()
        self._thread = thread  # before it starts: a garbage collector may call `close` there at once
        atexit.register(self.close)  # the model must not go while the thread computes with it
        try:
            thread.start()
        except RuntimeError as err:
            self._thread = None
            atexit.unregister(self.close)
            logger.warning("all heads count for the policy: no thread to find them on: %s", err)

    def settle(self, session: Sequence) -> None:
        """Let a text of the model use the heads found meanwhile. Call it between two of its requests."""
        found, self._found = self._found, None
        if found is not None:
            self.calibration = found
        self._use(session)

    def wait(self, progress: Progress | None, *, most: float | None = None) -> None:
        """Wait until the running calibration has ended. progress: tokens done, and in all.

        most: return with a warning as soon as it seems to take more seconds than that. The calibration continues.
        """
        if self._thread is not None:
            self._progress = progress
            try:
                while not self._ended.wait(0.1):
                    if most is not None and self._expected is not None and self._expected > most:
                        logger.warning(
                            "all heads count for the policy: to find the retrieval heads takes about %.0f s here. "
                            "'kvflash-run calibrate' finds them",
                            self._expected,
                        )
                        return
            finally:
                self._progress = None

    def close(self) -> None:
        """Stop the calibration and wait for its thread."""
        self._stop.set()
        self._idle.set()
        if self._thread is current_thread():
            # a garbage collector closes the model on the thread that computes with it: wait for the thread's end
            self._outlived.callback(self._model._exit_stack.pop_all().close)
            atexit.unregister(self.close)
            return
        interrupted = False
        while self.is_finding:
            try:
                self._ended.wait()
            except KeyboardInterrupt:  # the caller closes the model next, and the thread still computes with it
                interrupted = True
        atexit.unregister(self.close)
        if interrupted:
            raise KeyboardInterrupt

    def _load(self, path: Path) -> Calibration:
        found = load(path, model_id=self._model_id, layers=self._layers, shapes=self._shapes)
        if found.model != self._model_id.identity:
            logger.warning(
                "the heads of %s were found on another file of this model, or with other settings: "
                "'kvflash-run calibrate' finds them on this one",
                path,
            )
        return found

    def _take(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._use(self._session)

    def _use(self, session: Sequence) -> None:
        if self.calibration is None or self._used.get(session.seq) is self.calibration:
            return
        self._used[session.seq] = self.calibration
        heads = self.heads
        if heads is not None and session.scoring is not None:
            session.scoring.use(heads)

    def _run(self) -> None:
        try:
            with self._outlived:
                self._find()
        finally:
            self._ended.set()

    def _find(self) -> None:
        from .measure import Eta  # here: most models find their heads in a file
        from .run import STEP, Stopped, calibrate

        try:
            found = calibrate(
                self._model,
                model_id=self._model_id,
                settings=self._settings,
                progress=partial(self._report, Eta(STEP)),
                stop=self._stop,
            )
        except Stopped:
            return
        except CalibrationError as err:
            logger.warning("all heads count for the policy: %s. 'kvflash-run calibrate' finds the retrieval heads", err)
            return
        except Exception:
            logger.exception("all heads count for the policy: the calibration failed")
            return
        if not found.chosen:
            logger.warning("all heads count for the policy: no head of this model finds what questions ask for")
        try:
            save(found, heads_file(self._model_id.identity))
        except OSError as err:
            folder = heads_file(self._model_id.identity).parent
            logger.warning(
                "the retrieval heads cannot be kept in %s (%s), so the next run finds them again: set KVFLASH_HEADS to"
                " a folder that can be written",
                folder,
                err.strerror,
            )
        self._found = found

    def _report(self, eta: Eta, done: int, total: int) -> None:
        self._idle.wait(BUSY)
        self._expected = eta.seconds(done, total)
        progress = self._progress
        if progress is not None:
            progress(done, total)


def open_finder(llm: Llama, model: LlamaModel, session: Sequence, scorer: Scorer | None) -> HeadFinder | None:
    """Return a finder where the policy can restrict itself to some heads, else None. llm, model: as of `HeadFinder`."""
    if not isinstance(scorer, Selective):
        return None
    given = session.config.calibrate
    try:
        return HeadFinder(llm, model, session, given=None if isinstance(given, bool) else given)
    except (OSError, SnapshotError) as err:
        logger.warning("all heads count for the policy: the model's file cannot be read again: %s", err)
        return None
