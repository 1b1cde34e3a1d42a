"""A simulated target with drafts: the times and tokens of its rounds, as a controller sees them."""

import math
import random
from dataclasses import dataclass, field

from ssd.speculation.controller import Controller
from ssd.speculation.estimates import Calibration
from ssd.speculation.round_record import RoundRecord
from ssd.types import LookupResult

LOOKAHEAD = 6
COLUMNS = (1, 2, 4, 7)
PROMPT_TOKENS = 60
TEXT_TOKENS = 160


@dataclass
class World:
    """Times in seconds, probabilities, and the sequences of a batch."""

    batch: int = 1
    plain_seconds: float = 0.010
    """T_verify of one column at this batch."""
    wide_factor: float = 1.5
    """T_verify of K+1 columns over that of one; linear between them."""
    host_seconds: float = 0.001
    table_factor: float = 0.8
    """T_table over T_verify of K+1 columns."""
    table_columns: bool = False
    """Whether a table of fewer columns takes less time, in proportion."""
    long_wait_seconds: float = 0.0
    """Wait of a tenth of the rounds beside that for the table."""
    hit_rate: float = 0.85
    acceptance: float = 0.8
    texts: tuple[float, ...] = ()
    """Acceptance in texts of ``TEXT_TOKENS``, which sequences have in turn; empty: ``acceptance``.
    """
    noise: float = 0.1
    """Relative standard deviation of all times."""
    opening_rounds: int = 5
    shared_core: float = 1.0
    """Factor on all times of the target while a draft works."""
    has_drafts: bool = True
    most_sessions: int = 256
    """Sequences for which the drafts have room."""
    num_forced: int = 0
    """Sequences that are not in mode AUTO: they always speculate."""
    is_calibrated: bool = True
    tokens_a_chunk: float = math.inf
    """Tokens after which the next round stores a chunk of a prompt first."""
    chunk_seconds: float = 0.020
    """Time of a chunk of ``PROMPT_TOKENS``."""
    chunk_factor: float = 1.0
    """Factor on it while a draft works."""
    burst_seconds: float = 0.0
    """Mean time for which other work slows the machine."""
    calm_seconds: float = math.inf
    """Mean time between two such bursts."""
    burst_factor: float = 1.0
    """Factor on all times of the target in a burst."""

    def verify_seconds(self, columns: int) -> float:
        share = (columns - 1) / LOOKAHEAD
        return self.plain_seconds * (1.0 + (self.wide_factor - 1.0) * share)

    def plain_rate(self) -> float:
        """Tokens/s of plain decoding."""
        mean_noise = math.exp(self.noise**2 / 2.0)
        chunk = self.batch / self.tokens_a_chunk * self.chunk_seconds * mean_noise
        return self.batch / (self.verify_seconds(1) * mean_noise + self.host_seconds + chunk)

    def calibration(self) -> Calibration:
        if not self.is_calibrated:
            return Calibration()
        return Calibration({(c, self.batch): self.verify_seconds(c) for c in COLUMNS})


@dataclass
class Run:
    """Rounds of a controller in a world, which a test may change on the way."""

    world: World
    seed: int = 0
    controller: Controller = field(init=False)
    tokens: float = 0.0
    tokens_without_chunk: float = 0.0
    seconds: float = 0.0
    changes: int = 0
    """Changes of the reported choice."""
    num_openings: int = 0
    """How often the sessions of the sequences in mode AUTO began to open."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.bursts = random.Random(self.seed + 1)
        self.is_burst, self.changes_at = False, 0.0
        self.stall_seconds = 0.0
        """Time for which the machine pauses in the next round, in a chunk if it has one."""
        self.controller = Controller(COLUMNS, LOOKAHEAD, self.world.calibration())
        self.rounds_on = self.text = 0
        self.proposed = [0] * self.world.batch

    def run(self, seconds: float) -> float:
        """Run rounds for so long; returns their tokens/s."""
        tokens_before, seconds_before = self.tokens, self.seconds
        while self.seconds < seconds_before + seconds:
            self.round()
        return (self.tokens - tokens_before) / (self.seconds - seconds_before)

    def run_texts(self, count: int) -> float:
        """Run the rounds of the first texts of each sequence; returns their tokens/s."""
        while self.tokens < count * TEXT_TOKENS * self.world.batch:
            self.round()
        return self.tokens / self.seconds

    def burst_factor(self) -> float:
        world = self.world
        if math.isinf(world.calm_seconds):
            return 1.0
        while self.seconds >= self.changes_at:
            self.is_burst = not self.is_burst
            mean = world.burst_seconds if self.is_burst else world.calm_seconds
            self.changes_at += self.bursts.expovariate(1.0 / mean)
        return world.burst_factor if self.is_burst else 1.0

    def wait_seconds(self, verify: float, factor: float, max_proposed: int) -> float:
        world = self.world
        table = world.table_factor * world.verify_seconds(COLUMNS[-1]) * factor
        table *= (max_proposed + 1) / COLUMNS[-1] if world.table_columns else 1.0
        is_long = world.long_wait_seconds > 0 and self.random.random() < 0.1
        return max(0.0, table - verify) + world.long_wait_seconds * is_long

    def round(self) -> None:
        world, draw = self.world, self.random.random
        was_on = self.controller.report().is_on
        text = int(self.tokens / world.batch / TEXT_TOKENS) if world.texts else 0
        if len(self.proposed) != world.batch or text != self.text:
            self.proposed, self.rounds_on, self.text = [0] * world.batch, 0, text
        choice = self.controller.choose(world.batch)
        is_on = choice.is_on and world.has_drafts
        self.rounds_on = self.rounds_on + 1 if is_on else 0
        self.num_openings += self.rounds_on == 1
        is_open = self.rounds_on > world.opening_rounds
        num_sessions = min(world.batch if is_on else world.num_forced, world.most_sessions)
        num_open = num_sessions if is_open else min(num_sessions, world.num_forced)
        proposed = self.proposed = [
            length if index < num_sessions else 0 for index, length in enumerate(self.proposed)
        ]
        columns = next(each for each in COLUMNS if each > max(proposed))
        noise = self.random.lognormvariate(0.0, world.noise)
        factor = noise * (world.shared_core if is_on else 1.0) * self.burst_factor()
        verify = world.verify_seconds(columns) * factor
        record = RoundRecord(
            num_auto=world.batch - world.num_forced,
            num_sessions=num_sessions,
            lookups={LookupResult.HIT: num_open} if num_open else {},
            verify_seconds=verify,
        )
        texts = world.texts or (world.acceptance,)
        for index, length in enumerate(proposed):
            acceptance = texts[(text + index) % len(texts)]
            accepted = 0
            while accepted < length and draw() < acceptance:
                accepted += 1
            record.add_outcome(length, accepted, accepted + 1)
        hits = [index < num_open and draw() < world.hit_rate for index in range(world.batch)]
        wait = self.wait_seconds(verify, factor, choice.max_proposed) if is_open else 0.0
        seconds, chunk = verify + wait + world.host_seconds, 0.0
        if self.tokens_without_chunk >= world.tokens_a_chunk:
            self.tokens_without_chunk -= world.tokens_a_chunk
            usual = world.chunk_seconds * noise * (world.chunk_factor if is_on else 1.0)
            chunk = usual + self.stall_seconds
        self.proposed = [
            hit * (LOOKAHEAD if index < world.num_forced else choice.max_proposed)
            for index, hit in enumerate(hits)
        ]
        record.prompt_tokens = PROMPT_TOKENS if chunk else 0
        seconds += 0.0 if chunk else self.stall_seconds
        record.wait_seconds, record.prefill_seconds, record.seconds = wait, chunk, seconds + chunk
        self.controller.add_round(record)
        self.tokens += record.num_tokens
        self.tokens_without_chunk += record.num_tokens
        self.seconds += record.seconds
        self.changes += self.controller.report().is_on is not was_on
