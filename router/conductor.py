"""The route of a request over the workers, written once, top to bottom.

Owns the order of the calls, retries and cancellation; knows neither HTTP nor text. Decode
reserves before prefill computes; the first token comes from prefill, the rest from decode.
Invariants: both calls of an attempt end with it, whatever happens; a prefill worker that is lost
before its hand-off is committed is replaced for the same promise of room; when decode is lost, each
choice goes on from the tokens it has given, so nothing is repeated and nothing is missing; a
finish reason is always a worker's or a stop string's, never made up here.
"""

import asyncio
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Sequence
from dataclasses import dataclass

from baton.cluster.errors import BatonError
from baton.cluster.settings import RouterSettings
from baton.v1 import common_pb2, decode_pb2
from router.admission import Admission, QueueTimeout, Slot
from router.calls import WorkerCall, WorkerContradiction, WorkerFault, WorkerFull
from router.delivery import deliver
from router.dialer import Dialer, Stops
from router.generation import Generation
from router.hold import Hold
from router.job import Job, Leg, Output, Served, Workers
from router.metrics import RouterMetrics
from router.notes import timed
from router.placement import NoRoom, NoWorker, Plan
from router.planner import Planner
from router.selection import Selection

MAX_ATTEMPTS = 3
MAX_OUTRUN = 2
# A hand-off fails on both sides when decode is lost; the two see it that much apart.
BLAME_S = 1.0
# Closing statistics come with the last tokens, decode's, and prefill's after a hand-off; nobody
# waits longer for them.
CLOSING_S = 1.0


class Outrun(Exception):
    """Another router has loaded the chosen workers since they were chosen."""


@dataclass
class Conductor:
    """`selection` is of one model."""

    selection: Selection
    planner: Planner
    workers: Workers
    dialer: Dialer
    admission: Admission
    metrics: RouterMetrics
    settings: RouterSettings

    async def run(self, job: Job, output: Output) -> Served:
        """Serves a job to its end. Raises BatonError when it cannot."""
        served, waiting = Served(), job.trail.begin("admission", time.monotonic())
        leg = Leg.whole(job)
        if job.targets.reject:
            await self.selection.refuse_if_late(leg, self.admission.work_s)
        claim = self.planner.claim(leg.facts, self.selection.candidates(), job)
        try:
            async with self.admission.slot(job.latest_turn, claim) as slot:
                waiting.end = time.monotonic()
                await self._serve(leg, output, served, slot)
        except QueueTimeout as error:
            begun = output.generation.num_tokens > 0
            raise (None if begun else job.too_late()) or error from error
        return served

    async def _serve(self, leg: Leg, output: Output, served: Served, slot: Slot) -> None:
        """Attempts a leg until it is served; what a lost worker leaves behind goes on elsewhere."""
        full, trail = leg.turn.full, leg.job.trail
        while True:
            began_at = time.monotonic()
            try:
                with timed(trail, "placement"):
                    plan = await self.selection.choose(leg, full, served)
            except (NoWorker, NoRoom) as error:
                if isinstance(error, NoWorker) and not full:
                    if leg.output_token_ids:
                        raise leg.failures[-1] from None
                    raise
                full.clear()
                with timed(trail, "admission"):
                    await slot.refused(leg.room_by)
                continue
            if not leg.failures:
                self.planner.check(plan, leg.facts)
            try:
                return await self._attempt(leg, plan, output, served, slot)
            except Outrun:
                served.outrun += 1
                served.plan = served.plan if leg.failures else None
            except WorkerFull as error:
                full.add(error.worker.worker_id)
            except WorkerFault as error:
                trail.lost(began_at, time.monotonic(), error.worker.worker_id, error.reason)
                self._give_up_or_retry(leg, error)
                if output.generation.num_tokens:
                    return await self._go_on(leg, output, served, slot)

    async def _go_on(self, leg: Leg, output: Output, served: Served, slot: Slot) -> None:
        """Continues every unfinished choice of a broken leg from the tokens it has given."""
        self.metrics.retries.labels("continued").inc()
        choices = output.generation.choices
        room_by = asyncio.get_running_loop().time() + self.settings.queue_timeout_s
        legs = [
            leg.resumed(index, choices[index].token_ids, room_by)
            for index in output.generation.unfinished(leg.choices)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for resumed in legs:
                    group.create_task(self._serve(resumed, output, served, slot))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _attempt(
        self, leg: Leg, plan: Plan, output: Output, served: Served, slot: Slot
    ) -> None:
        decode: WorkerCall | None = None
        reservation: common_pb2.Reservation | None = None
        overtaken: WorkerCall | None = None
        with self.planner.hold(plan, leg.facts) as hold:
            try:
                with self.selection.expecting(leg, plan):  # a refusal takes it back
                    await self._confirm(leg, hold, served)
                    # 1) Decode promises room before any compute is spent.
                    if plan.decode is not None:
                        decode = self.dialer.decode(leg, plan.decode, hold)
                        reservation = await self._reserve(leg, decode)
                # 2) Prefill computes the prompt, answers the first token, hands the cache over.
                if plan.prefill is not None:
                    overtaken = await self._prefill(
                        leg, hold, decode, reservation, output, served, slot
                    )
                else:
                    self._accepted(leg, slot)
                # 3) Decode goes on from there.
                open_choices = output.generation.unfinished(leg.choices)
                if decode is not None and reservation is not None and open_choices:
                    if hold.plan.prefill is not None:
                        self.selection.landed(leg, decode.worker)
                    await self._follow_decode(leg, decode, reservation, output, served, hold)
                if overtaken is not None:
                    await asyncio.wait({overtaken.ahead()}, timeout=CLOSING_S)
            finally:
                for call in filter(None, (overtaken, decode)):
                    call.cancel()

    @staticmethod
    def _accepted(leg: Leg, slot: Slot) -> None:
        leg.job.trail.accepted = True
        slot.accepted()

    async def _reserve(self, leg: Leg, decode: WorkerCall) -> common_pb2.Reservation:
        with timed(leg.job.trail, "reserve"):
            event = await decode.read_within(self.settings.reserve_timeout_s)
        if event is None or not event.HasField("reserved"):
            raise decode.fault("the first event was not a reservation")
        return event.reserved.reservation

    async def _prefill(
        self,
        leg: Leg,
        hold: Hold,
        decode: WorkerCall | None,
        reservation: common_pb2.Reservation | None,
        output: Output,
        served: Served,
        slot: Slot,
    ) -> WorkerCall | None:
        """On one worker; when that is lost, on another for the same promise of room. Gives the call
        whose last words are still to come and change nothing any more."""
        while (worker := hold.plan.prefill) is not None:
            opened_at, overtaken = time.monotonic(), False
            prefill = self.dialer.prefill(leg, worker, reservation, hold)
            try:
                overtaken = await self._follow_prefill(leg, prefill, decode, output, served, slot)
                return prefill if overtaken else None
            except WorkerFault as fault:
                other = await self._another_prefill(leg, fault, decode)
                if other is None or reservation is None:
                    raise
                leg.job.trail.lost(opened_at, time.monotonic(), worker.worker_id, fault.reason)
                self._give_up_or_retry(leg, fault)
                hold.move(other)
                reservation.generation += 1  # what the lost one may still send is refused
            finally:
                if not overtaken:
                    prefill.cancel()
        return None

    async def _another_prefill(
        self, leg: Leg, fault: WorkerFault, decode: WorkerCall | None
    ) -> Plan | None:
        """Who can take over for `decode`; None when the promise is lost as well, or was used."""
        if decode is None or fault.worker is decode.worker:
            return None
        if fault.lost_peer:
            await asyncio.wait({decode.ahead()}, timeout=BLAME_S)
        if decode.ahead().done():
            decode.ahead().result()  # raises when it was decode that failed
            return None
        if isinstance(fault, WorkerContradiction):
            return None
        return self.selection.take_over(leg, fault.worker, decode.worker)

    async def _follow_prefill(
        self,
        leg: Leg,
        prefill: WorkerCall,
        decode: WorkerCall | None,
        output: Output,
        served: Served,
        slot: Slot,
    ) -> bool:
        """Until the hand-off is committed, or every choice ended on its first token. Whether
        prefill has more to say, which nothing depends on."""
        generation, answered = output.generation, False
        while True:
            if await self._decode_began(prefill, decode, answered):
                return True
            event = await prefill.read()
            kind = event.WhichOneof("event") if event is not None else "done"
            if kind == "started":
                if not leg.output_token_ids:
                    served.num_cached_tokens = event.started.num_cached_tokens
                self._accepted(leg, slot)
            elif kind == "first_tokens":
                answered = True
                tokens = event.first_tokens.tokens
                await deliver(leg, tokens, prefill, output, served, again=True)
                if self._ended_here(leg, generation, tokens):
                    return False
                if not generation.unfinished(leg.choices):
                    return True
            elif kind == "done":
                break
        if not answered or (decode is None and generation.unfinished(leg.choices)):
            raise prefill.fault("the stream ended without its tokens")
        return False

    async def _decode_began(
        self, prefill: WorkerCall, decode: WorkerCall | None, answered: bool
    ) -> bool:
        """Waits for prefill's next event or, when prefill has answered, for decode's first one: it
        proves that everything has landed, whatever becomes of prefill. Raises decode's fault as
        soon as it shows."""
        seconds = self.settings.prefill_timeout_s
        while True:
            ahead = {prefill.ahead()}
            if decode is not None and not decode.ahead().done():
                ahead.add(decode.ahead())
            elif decode is not None:
                decode.ahead().result()
                if answered:
                    return True
            if prefill.ahead().done():
                return False
            if not (await asyncio.wait(ahead, timeout=seconds, return_when=FIRST_COMPLETED))[0]:
                raise prefill.silence(seconds)

    async def _follow_decode(
        self,
        leg: Leg,
        decode: WorkerCall,
        reservation: common_pb2.Reservation,
        output: Output,
        served: Served,
        hold: Hold,
    ) -> None:
        generation = output.generation
        with Stops(self.dialer, decode.worker, reservation) as stops:
            async with decode.watched(self.settings.decode_timeout_s):
                last = await self._read_decode(leg, decode, stops, output, served)
            if generation.unfinished(leg.choices):
                raise decode.fault("the stream ended before its choices")
            # After a hand-off a decode that is still at it has nothing to say that matters.
            goes_on = self._ended_here(leg, generation, last)
            if last and not (goes_on and hold.plan.prefill):
                await self._close(leg, decode, served)

    async def _read_decode(
        self, leg: Leg, decode: WorkerCall, stops: Stops, output: Output, served: Served
    ) -> Sequence[common_pb2.Token]:
        """Until every choice has ended, by these last tokens, or decode has said all."""
        generation = output.generation
        while (event := await decode.read()) is not None:
            kind = event.WhichOneof("event")
            if kind == "tokens":
                tokens = event.tokens.tokens
                await deliver(leg, tokens, decode, output, served)
                if not generation.some_ended:
                    continue
                stops.tell(generation.ended_by_text(tokens))
                if not generation.unfinished(leg.choices):
                    return tokens
            elif kind == "done":
                self._note_done(leg, event.done, served)
                break
        return ()

    async def _close(self, leg: Leg, decode: WorkerCall, served: Served) -> None:
        """Waits for what decode says at the end."""
        try:
            async with asyncio.timeout(CLOSING_S):
                while (event := await decode.read()) is not None:
                    if event.HasField("done"):
                        return self._note_done(leg, event.done, served)
        except (TimeoutError, BatonError):
            return  # the answer is complete without it

    @staticmethod
    def _ended_here(leg: Leg, generation: Generation, tokens: Sequence[common_pb2.Token]) -> bool:
        """Every choice has ended, but a worker does not know: only cancelling stops it."""
        ended = not generation.unfinished(leg.choices)
        return ended and bool(generation.ended_by_text(tokens))

    @staticmethod
    def _note_done(leg: Leg, done: decode_pb2.GenerateDone, served: Served) -> None:
        # Zero after a hand-off: prefill's own hits, noted before, are the true ones.
        if not leg.output_token_ids:
            served.num_cached_tokens = served.num_cached_tokens or done.num_cached_tokens

    async def _confirm(self, leg: Leg, hold: Hold, served: Served) -> None:
        """Raises Outrun when another router has just loaded the same workers, but not for ever."""
        with timed(leg.job.trail, "placement"):
            if served.outrun < MAX_OUTRUN and not await hold.confirmed():
                raise Outrun

    def _give_up_or_retry(self, leg: Leg, fault: WorkerFault) -> None:
        """Raises the failure of a leg when it was one too many."""
        leg.failures.append(fault)
        worker = fault.worker
        if fault.unreachable:
            self.workers.suspect(worker.worker_id, worker.incarnation)
        if len(leg.failures) >= MAX_ATTEMPTS:
            raise fault
        self.metrics.retries.labels(f"{worker.role}_failed").inc()
