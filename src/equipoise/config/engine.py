"""Settings of a rank: model, pages, scheduler, executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from equipoise.config.checks import at_least, needs, seconds
from equipoise.config.cost import CostConfig
from equipoise.errors import ConfigError

MAX_PAGE_SIZE = 2**16
MAX_PAGES = 2**26
MAX_SEATS = 2**20
MAX_DEPTH = 64
MAX_KV_GB = 65536
MAX_THREADS = 1024
MAX_VOCAB_SIZE = 2**24
MAX_RANKS = 1024
BALANCE_MARGIN = 1
ALIGNMENT_PASSES = 30
ALIGNMENT_DELAY_S = 5.0
RENT_OR_BUY_DELAY_S = 15.0
MAX_TIMELINE_STEPS = 1_000_000
OrderName = Literal["fcfs", "priority", "shortest-first", "longest-first"]
ORDERS: tuple[OrderName, ...] = get_args(OrderName)


@dataclass(frozen=True)
class ModelConfig:
    """Which model, where and how it runs."""

    model: str = "demo"
    """Folder of a Hugging Face checkpoint, or "demo" for the embedded demo model."""

    tokenizer: str | None = None
    """Folder of the tokenizer; the model's folder when not given."""

    executor: Literal["torch", "sim"] = "torch"
    """"torch" computes the model; "sim" keeps real time by a cost model and draws seeded tokens."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; "auto" takes a GPU when there is one."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and KV; "auto" is float32 on a CPU and the checkpoint's own type on a GPU."""

    max_model_len: int | None = None
    """Most tokens of a request, prompt and output together; the checkpoint's own when not given."""

    num_threads: int | None = None
    """CPU threads of a rank; when not given, the cores that affinity and the CPU quota leave, divided by the ranks."""

    def __post_init__(self) -> None:
        at_least("max-model-len", self.max_model_len, 2)
        at_least("num-threads", self.num_threads, 1, MAX_THREADS)


@dataclass(frozen=True)
class CacheConfig:
    """KV pages and the prefix cache."""

    page_size: int = 16
    """Tokens of a KV page; a power of two."""

    num_pages: int | None = None
    """KV pages; as many as `kv_memory_gb` holds when not given."""

    kv_memory_gb: float | None = None
    """Memory for KV pages, in GiB; by default 90% of the free GPU memory, or a quarter of the free RAM (4 at most)."""

    prefix_cache: bool = True
    """Share full pages between requests with the same prefix."""

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ConfigError(f"page-size: {self.page_size} is not a power of two")
        at_least("page-size", self.page_size, 1, MAX_PAGE_SIZE)
        at_least("num-pages", self.num_pages, 1, MAX_PAGES)
        if self.kv_memory_gb is not None and not 0 < self.kv_memory_gb <= MAX_KV_GB:
            raise ConfigError(f"kv-memory-gb: {self.kv_memory_gb} must be more than 0 and at most {MAX_KV_GB}")


@dataclass(frozen=True)
class SchedulerConfig:
    """What a step may hold, and who goes first."""

    max_running: int = 256
    """Requests that run at once (seats)."""

    max_step_tokens: int = 2048
    """Tokens of a step: decodes and prefill chunks together."""

    chunked_prefill: bool = True
    """Split prompts over steps; off: a prompt runs whole or waits."""

    long_prefill_cap: int = 0
    """Most tokens of one prefill chunk while others could use the step, 0 for no cap."""

    adaptive_prefill_cap: bool = False
    """Raise the long-prefill cap to the step's tokens divided by the requests that could prefill."""

    page_aligned_prefill: bool = False
    """Chunks that are not a prompt's last end on a page boundary, and are charged by whole pages."""

    prefill_interval: int = 1
    """While something decodes, prefill n steps after the last prefill at the earliest, unless requests pile up."""

    admission_cap: int | None = None
    """Requests that may run at once, when fewer than the seats; no such cap when not given."""

    min_free_seats: int = 1
    """Free seats to wait for before anyone is admitted while others run, so that prefills come in groups."""

    balance: bool = False
    """Admit nobody while any rank of the group is full, so that prefills come on all ranks at once."""

    balance_margin: int | None = None
    """Free seats with which a rank counts as full under `balance`; 1 when not given, 0 shortens the wait."""

    prefill_alignment: bool = False
    """Prefill only when all ranks of the group have something to prefill, within the two bounds below."""

    prefill_alignment_passes: int | None = None
    """Steps that a prefill waits at most for the other ranks; 30 when not given."""

    prefill_alignment_delay_s: float | None = None
    """Seconds that a prefill waits at most for the other ranks; 5 when not given."""

    rent_or_buy: bool = False
    """Admit requests when the seats kept empty have cost as much as the prefill that fills them, over all ranks."""

    rent_or_buy_max_delay_s: float | None = None
    """Seconds that a request for which there is room waits at most for `rent_or_buy`; 15 when not given."""

    rules: tuple[str, ...] = ()
    """Rules of your own, each "module:function" or an entry point of the group equipoise.rules."""

    num_drafts: int = 0
    """Tokens guessed ahead per step from the request's own text (speculative decoding by n-grams), 0 for none."""

    order: OrderName = "fcfs"
    """Who is next: who came first, the lower priority number, the shortest (with ageing) or the longest prompt."""

    ageing_s: float = 0.01
    """Under shortest-first: seconds of waiting that make up for one prompt token."""

    preempt: Literal["last", "cheapest"] = "last"
    """Who is preempted when pages lack: the last in order, or the one with the fewest tokens to compute again."""

    max_bypass: int = 0
    """Requests that may pass one that lacks pages; 0 for strict order."""

    depth: int = 1
    """Steps planned ahead of their results: 0 synchronous, 1 asynchronous."""

    reserve_full_prompt: bool = True
    """Admit a request only when its whole prompt has pages; off: when its first chunk has."""

    watermark: float = 0.0
    """Share of pages (0 to 1) that an admission must leave free."""

    trace_steps: int = 0
    """Steps whose decisions are kept for /debug/decisions, 0 for none."""

    max_waiting_reqs: int = 4096
    """Requests that may wait before new ones are refused with 429."""

    max_waiting_tokens: int | None = None
    """Prompt tokens that may wait before new requests are refused with 429; no limit when not given."""

    def __post_init__(self) -> None:
        at_least("max-running", self.max_running, 1, MAX_SEATS)
        at_least("max-step-tokens", self.max_step_tokens, 1)
        at_least("long-prefill-cap", self.long_prefill_cap, 0)
        at_least("prefill-interval", self.prefill_interval, 1)
        at_least("admission-cap", self.admission_cap, 1)
        at_least("min-free-seats", self.min_free_seats, 1)
        if self.min_free_seats > self.max_running:
            raise ConfigError(f"min-free-seats: {self.min_free_seats} is more than max-running, {self.max_running}")
        self._check_gates()
        at_least("depth", self.depth, 0, MAX_DEPTH)
        at_least("num-drafts", self.num_drafts, 0)
        at_least("trace-steps", self.trace_steps, 0)
        at_least("max-bypass", self.max_bypass, 0)
        if self.order not in ORDERS:
            raise ConfigError(f"order: {self.order!r} is not one of {', '.join(ORDERS)}")
        if not self.ageing_s > 0:
            raise ConfigError(f"ageing-s: {self.ageing_s} must be more than 0")
        at_least("max-waiting-reqs", self.max_waiting_reqs, 1)
        at_least("max-waiting-tokens", self.max_waiting_tokens, 1)
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark: {self.watermark} must be at least 0 and less than 1")

    def _check_gates(self) -> None:
        needs("balance", self.balance, "balance-margin", self.balance_margin)
        at_least("balance-margin", self.balance_margin, 0)
        margin = BALANCE_MARGIN if self.balance_margin is None else self.balance_margin
        if self.balance and margin >= self.max_running:
            raise ConfigError(
                f"balance-margin: {margin} must be less than max-running, {self.max_running}, "
                "or nobody is ever admitted"
            )
        needs("prefill-alignment", self.prefill_alignment, "prefill-alignment-passes", self.prefill_alignment_passes)
        needs("prefill-alignment", self.prefill_alignment, "prefill-alignment-delay", self.prefill_alignment_delay_s)
        at_least("prefill-alignment-passes", self.prefill_alignment_passes, 1)
        seconds("prefill-alignment-delay", self.prefill_alignment_delay_s)
        needs("rent-or-buy", self.rent_or_buy, "rent-or-buy-max-delay", self.rent_or_buy_max_delay_s)
        seconds("rent-or-buy-max-delay", self.rent_or_buy_max_delay_s)


@dataclass(frozen=True)
class SimExecutorConfig:
    """What a rank without weights pretends to be; how long its steps take is CostConfig's."""

    sim_seed: int = 0
    """Seed of the tokens drawn; a request's tokens depend on it, on its prompt and on nothing else."""

    sim_vocab_size: int = 32000
    """Token ids drawn lie below this, when no tokenizer bounds them."""

    sim_num_pages: int = 16384
    """KV pages of a simulated rank, unless `num_pages` is given."""

    sim_max_model_len: int = 32768
    """Model length of a simulated rank, unless `max_model_len` is given."""

    def __post_init__(self) -> None:
        if not -(2**63) <= self.sim_seed < 2**63:
            raise ConfigError(f"sim-seed: {self.sim_seed} must be at least {-(2**63)} and at most {2**63 - 1}")
        at_least("sim-vocab-size", self.sim_vocab_size, 1, MAX_VOCAB_SIZE)
        at_least("sim-num-pages", self.sim_num_pages, 1, MAX_PAGES)
        at_least("sim-max-model-len", self.sim_max_model_len, 2)


@dataclass(frozen=True)
class RanksConfig:
    """How many ranks serve the model, and which of them gets a request."""

    dp_size: int = 1
    """Data-parallel ranks: processes that hold the whole model each and share the requests."""

    lockstep: bool = False
    """Ranks step together, as with mixture-of-experts models: each step begins when all have told the others their
    state, and lasts as long as its slowest rank."""

    rank_policy: str = "minimum_tokens"
    """Who gets a request: minimum_tokens, round_robin, or your own, an entry point or "module:attribute"."""

    rank_timeout_s: float = 30.0
    """Seconds of silence after which a rank that has work gets no more; after four times as many it is ended."""

    restart_ranks: bool = True
    """Start a rank that died anew while others live; without others the server ends."""

    timeline_steps: int = 0
    """Steps of each rank that are kept with their times for /debug/timeline, 0 for none."""

    def __post_init__(self) -> None:
        at_least("dp-size", self.dp_size, 1, MAX_RANKS)
        if not self.rank_policy:
            raise ConfigError("rank-policy: it must not be empty")
        seconds("rank-timeout", self.rank_timeout_s)
        at_least("timeline-steps", self.timeline_steps, 0, MAX_TIMELINE_STEPS)


@dataclass(frozen=True)
class EngineConfig:
    """Everything a rank process is told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sim: SimExecutorConfig = field(default_factory=SimExecutorConfig)
    ranks: RanksConfig = field(default_factory=RanksConfig)
    cost: CostConfig = field(default_factory=CostConfig)
