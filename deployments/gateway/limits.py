"""How much a key may ask for: requests and tokens a minute as token buckets, and a budget of tokens a day or month.

    reservation = limiter.reserve(key, estimate)    429 if it does not fit; nothing is taken then
    reservation.settle(used)                        with what it has really cost
    reservation.refund()                            it has cost nothing

A bucket holds a minute's worth, so what a key uses in any minute is at most its limit and that burst. A reservation
that is given back, in part or whole, leaves the bucket as if only the rest had been taken from the start: what would
have overflowed meanwhile is not given back, or long idle reservations would let a key save up. A request counts
whether it succeeds or not; its tokens only as far as they were used. More tokens than were reserved are a debt, paid
before the next request.

Requests and tokens a minute: every gateway replica counts alone and enforces its share, limit / replicas (at least one
request at a time), so that together they keep the limit without asking each other; a key whose requests all reach one
replica gets that share only.

Budgets are one for all replicas and outlive them: a replica counts what it has charged itself since it started, and
`learn`s what all others have, also its own earlier lives, as of a few seconds ago (`budgets`). So they overrun a budget
by no more than what the others charged since then.

Whole numbers throughout, so nothing is gained or lost by rounding. Used from one event loop. Pure but for its clocks.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from actors.registry.apikeys import ApiKey, Period, period_start
from actors.registry.serving import BudgetUse
from cluster.errors import DependencyError, RequestError
from deployments.gateway.usage import Charge

_SECOND_NS: Final = 1_000_000_000
_MINUTE_NS: Final = 60 * _SECOND_NS
_BYTES_PER_TOKEN: Final = 4
_UNSAID_COMPLETION: Final = 256
"""Assumed for a request without `max_tokens`. The longest that the model could say would shut small limits out."""


def estimate(body: Mapping[str, Any]) -> int:
    """Tokens to reserve for a generation or an embedding, from the body as it came: its text, and what it allows.

    An estimate: the real usage settles it.
    """
    text = sum(_tokens(body.get(name)) for name in ("messages", "prompt", "input", "query", "documents"))
    if "messages" not in body and "prompt" not in body:
        return max(1, text)
    completion = _count(body.get("max_completion_tokens")) or _count(body.get("max_tokens")) or _UNSAID_COMPLETION
    return max(1, text + completion * choices(body))


def choices(body: Mapping[str, Any]) -> int:
    """Answers that a generation asks for: `n` to each of its prompts."""
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return prompts * (_count(body.get("n")) or 1)


def require_choices(body: Mapping[str, Any], most: int) -> None:
    """Raises `RequestError` for a generation that asks for more than `most` answers: an engine would take them all."""
    asked = choices(body)
    if asked > most:
        raise RequestError(
            f"The request asks for {asked} answers (`n` to each prompt); {most} is the most of one request.",
            param="n" if _count(body.get("n")) > most else "prompt",
            code="invalid_value",
            hint="Send several requests, or raise gateway.max_choices.",
        )


def _count(value: Any) -> int:
    """A number above 0; 0 for anything else, which is the engine's to refuse."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _tokens(value: Any) -> int:
    if isinstance(value, str):
        return math.ceil(len(value.encode(errors="replace")) / _BYTES_PER_TOKEN)
    if isinstance(value, list):
        return sum(1 if isinstance(each, int) else _tokens(each) for each in value)
    if isinstance(value, dict):
        return sum(_tokens(each) for each in value.values())
    return 0


@dataclass(eq=False)
class _Hold:
    """Tokens that were taken for a request which goes on, and how full the bucket has been since."""

    tokens: int
    cost: int
    """Of one token when they were taken."""
    peak: int


class Bucket:
    """`limit / replicas` a minute, a minute's worth at once. A unit is one token's share of a nanosecond."""

    def __init__(self, limit: int, *, replicas: int = 1, now_ns: int = 0) -> None:
        self._limit = limit
        self._at = now_ns
        self._open: set[_Hold] = set()
        self._level = 0
        self.share(replicas)
        self._level = self._capacity

    def share(self, replicas: int) -> None:
        """From now on it is one of so many."""
        self._cost = _MINUTE_NS * replicas
        self._capacity = max(self._limit * _MINUTE_NS, self._cost)
        self._level = min(self._level, self._capacity)

    @property
    def most(self) -> int:
        """The largest amount that can ever be taken at once."""
        return self._capacity // self._cost

    def left(self, now_ns: int) -> int:
        """What can be taken now."""
        self._fill(now_ns)
        return max(0, self._level // self._cost)

    def wait_ns(self, tokens: int, now_ns: int) -> int | None:
        """How long until `tokens` can be taken, if nobody takes any: 0 for now, None for never."""
        self._fill(now_ns)
        if tokens * self._cost > self._capacity:
            return None
        return max(0, -((self._level - tokens * self._cost) // self._limit))

    def full_in_ns(self, now_ns: int) -> int:
        """How long until all of it can be taken."""
        self._fill(now_ns)
        return -((self._level - self._capacity) // self._limit)

    def take(self, tokens: int, now_ns: int) -> _Hold:
        """Take what `wait_ns` has said is there; `settle` it when it is known what it cost."""
        self._fill(now_ns)
        self._level -= tokens * self._cost
        hold = _Hold(tokens, self._cost, self._level)
        self._open.add(hold)
        return hold

    def settle(self, hold: _Hold, used: int, now_ns: int) -> None:
        """The request is over; it has cost `used`."""
        self._fill(now_ns)
        self._open.remove(hold)
        back = (hold.tokens - used) * hold.cost
        if back > 0:
            # Had it never been taken, the bucket would have stood higher by it, and spilled what is above the brim.
            back = min(back, self._capacity - hold.peak)
            for other in self._open:
                other.peak = min(self._capacity, other.peak + back)
        self._level += back

    def _fill(self, now_ns: int) -> None:
        if now_ns > self._at:  # a clock that goes back fills nothing, nor twice when it comes forward again
            self._level = min(self._capacity, self._level + (now_ns - self._at) * self._limit)
            self._at = now_ns
        for hold in self._open:
            hold.peak = max(hold.peak, self._level)


class Budget:
    """So many tokens for each day or month, in UTC: what this replica has charged, and what it has heard of others."""

    def __init__(self, tokens: int, period: Period) -> None:
        self.tokens = tokens
        self.elsewhere: BudgetUse | None = None
        """What all others have charged."""
        self._period: Period = period
        self._from = datetime.min.replace(tzinfo=UTC)
        self._used = 0
        self._held = 0

    def left(self, now: datetime) -> int:
        """What is neither used nor held by requests that go on."""
        since = self._turn(now)
        # Of another period, if the registry's clock turns a moment before ours, or has not been asked since.
        others = self.elsewhere.tokens if self.elsewhere is not None and self.elsewhere.since == since else 0
        return max(0, self.tokens - self._used - self._held - others)

    def ends_in_s(self, now: datetime) -> float:
        """Seconds until the next period."""
        start = self._turn(now)
        # From any day of a month, 32 days later is in the next one.
        after = start + timedelta(days=1) if self._period == "day" else (start + timedelta(days=32)).replace(day=1)
        return (after - now).total_seconds()

    def hold(self, tokens: int) -> None:
        """Set `tokens` aside for a request."""
        self._held += tokens

    def settle(self, held: int, used: int, now: datetime) -> None:
        """A request is over: it had set `held` aside, and has cost `used`, in the period in which it ends."""
        self._turn(now)
        self._held -= held
        self._used += used

    def _turn(self, now: datetime) -> datetime:
        start = period_start(self._period, now)
        if start > self._from:  # a clock that goes back begins no period again
            self._from, self._used = start, 0
        return self._from


@dataclass
class _Allowance:
    key_id: str
    requests: Bucket | None
    tokens: Bucket | None
    budget: Budget | None


@dataclass(eq=False)
class Reservation:
    """What one request has taken. Ends once: what comes after the first `settle` or `refund` changes nothing."""

    _limiter: "Limiter"
    _allowance: _Allowance
    _hold: _Hold | None
    tokens: int
    """The estimate that was taken."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """`x-ratelimit-…` as OpenAI names them, of this replica's share, as it stood when the request came in."""
    _ended: bool = False

    def settle(self, prompt: int, completion: int = 0) -> None:
        """It has cost so many tokens."""
        self._end(Charge(prompt, completion))

    def keep(self) -> None:
        """Nobody will know what it has cost: it stays at the estimate."""
        self._end(Charge(estimated=self.tokens))

    def refund(self) -> None:
        """It has cost no tokens."""
        self._end(Charge())

    def _end(self, charge: Charge) -> None:
        if not self._ended:
            self._ended = True
            self._limiter.end(self._allowance, self._hold, self.tokens, charge)


class Limiter:
    """The limits of all keys at one gateway replica of `replicas`.

    `charged` is told of every request that has ended. With `hear_first` a key with a budget is let in only once it is
    known what others have used of it (`learn`): a gateway that was restarted must not begin at nothing.
    """

    def __init__(
        self,
        *,
        replicas: int = 1,
        charged: Callable[[str, Charge], None] = lambda *_: None,
        hear_first: bool = False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._replicas = replicas
        self._charged = charged
        self._heard = not hear_first
        self._elsewhere: Mapping[str, BudgetUse] = {}
        self._clock_ns = clock_ns
        self._now = now
        self._allowances: dict[str, _Allowance] = {}

    def learn(self, elsewhere: Mapping[str, BudgetUse]) -> None:
        """What all other gateways have charged to budgets, by key id."""
        self._elsewhere, self._heard = elsewhere, True

    def share(self, replicas: int) -> None:
        """From now on this is one of so many gateway replicas."""
        if replicas == self._replicas:
            return
        self._replicas = replicas
        for allowance in self._allowances.values():
            for bucket in (allowance.requests, allowance.tokens):
                if bucket is not None:
                    bucket.share(replicas)

    def reserve(self, key: ApiKey, tokens: int) -> Reservation:
        """Take one request and `tokens`; `RequestError` 429 (`rate_limit_exceeded`, `insufficient_quota`) if not."""
        now_ns = self._clock_ns()
        allowance = self._of(key, now_ns)
        self._require_budget(key, allowance, tokens)
        waits = {
            what: bucket.wait_ns(amount, now_ns)
            for what, bucket, amount in (("requests", allowance.requests, 1), ("tokens", allowance.tokens, tokens))
            if bucket is not None
        }
        for what, wait_ns in waits.items():
            if wait_ns != 0:
                raise self._refused(key, allowance, what, tokens, wait_ns, now_ns)
        # All of it fits: only now is anything taken.
        if allowance.requests is not None:
            allowance.requests.settle(allowance.requests.take(1, now_ns), 1, now_ns)
        hold = allowance.tokens.take(tokens, now_ns) if allowance.tokens is not None else None
        if allowance.budget is not None:
            allowance.budget.hold(tokens)
        return Reservation(self, allowance, hold, tokens, _headers(allowance, now_ns))

    def end(self, allowance: _Allowance, hold: _Hold | None, held: int, charge: Charge) -> None:
        """For `Reservation`."""
        if allowance.tokens is not None and hold is not None:
            allowance.tokens.settle(hold, charge.tokens, self._clock_ns())
        if allowance.budget is not None:
            allowance.budget.settle(held, charge.tokens, self._now())
        if allowance.key_id:  # a caller without a key has none to charge
            self._charged(allowance.key_id, charge)

    def _of(self, key: ApiKey, now_ns: int) -> _Allowance:
        found = self._allowances.get(key.id)
        if found is None:
            budget = None
            if key.budget_tokens is not None and key.budget_period is not None:
                budget = Budget(key.budget_tokens, key.budget_period)
            found = _Allowance(key.id, self._bucket(key.rpm, now_ns), self._bucket(key.tpm, now_ns), budget)
            self._allowances[key.id] = found
        return found

    def _bucket(self, limit: int | None, now_ns: int) -> Bucket | None:
        return None if limit is None else Bucket(limit, replicas=self._replicas, now_ns=now_ns)

    def _require_budget(self, key: ApiKey, allowance: _Allowance, tokens: int) -> None:
        if allowance.budget is None:
            return
        if not self._heard:
            raise DependencyError(
                f"This gateway has not heard yet what the API key {key.name!r} has used of its budget.",
                hint="Try again soon; `flywheel status` says whether the registry runs.",
            )
        now = self._now()
        allowance.budget.elsewhere = self._elsewhere.get(key.id)
        left = allowance.budget.left(now)
        if tokens > left:
            raise RequestError(
                f"The API key {key.name!r} has {left} tokens left of {allowance.budget.tokens} this "
                f"{key.budget_period}; this request may need {tokens}.",
                status=429,
                code="insufficient_quota",
                hint="Ask for less, or wait for the next period.",
                headers={"Retry-After": str(max(1, math.ceil(allowance.budget.ends_in_s(now))))},
            )

    def _refused(
        self, key: ApiKey, allowance: _Allowance, what: str, tokens: int, wait_ns: int | None, now_ns: int
    ) -> RequestError:
        limit = key.rpm if what == "requests" else key.tpm
        shared = f", shared by {self._replicas} gateways" if self._replicas > 1 else ""
        headers = _headers(allowance, now_ns)
        if wait_ns is None:
            hint = "Lower max_tokens or send less at once: waiting does not help."
        else:
            wait_s = math.ceil(wait_ns / _SECOND_NS)
            headers["Retry-After"] = str(wait_s)
            hint = f"Try again in {wait_s} s."
        needs = "" if what == "requests" else f"; this request may need {tokens}"
        return RequestError(
            f"The API key {key.name!r} may use {limit} {what} a minute{shared}{needs}.",
            status=429,
            code="rate_limit_exceeded",
            hint=hint,
            headers=headers,
        )


def _headers(allowance: _Allowance, now_ns: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for what, bucket in (("requests", allowance.requests), ("tokens", allowance.tokens)):
        if bucket is not None:
            found[f"x-ratelimit-limit-{what}"] = str(bucket.most)
            found[f"x-ratelimit-remaining-{what}"] = str(bucket.left(now_ns))
            found[f"x-ratelimit-reset-{what}"] = f"{math.ceil(bucket.full_in_ns(now_ns) / 1_000_000)}ms"
    return found
