"""What the gateway counts. Counting is arithmetic on plain attributes, 2 us for a request; text is made when asked for.

Labels are bounded: routes are those of `gateway.routes`, workers those of the fleet and the last that left it, models
the first MAX_MODELS, later ones share one label.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from equipoise import __version__
from equipoise.gateway.http.descriptors import Descriptors
from equipoise.gateway.operate.fleet_page import fleet_families
from equipoise.obs.page import E2E_S, GAP_S, TTFT_S, Histogram, Page

if TYPE_CHECKING:
    from collections.abc import Iterator

    from equipoise.config.worker import WorkerRole
    from equipoise.gateway.fleet.fleet import Fleet
    from equipoise.gateway.fleet.router import Outcome
    from equipoise.gateway.fleet.workers_file import WorkersFile
    from equipoise.gateway.transport import Phase
    from equipoise.obs.page import Labels

PREFIX = "equipoise_gateway_"
MAX_MODELS = 64
OTHER_MODELS = "(other)"
MAX_FORMER_WORKERS = 256
"""Workers that left the fleet and are still shown, so that their last requests are not lost between two scrapes."""
WAIT_S = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120)


class ModelMetrics:
    """What is known of the answered requests of one model."""

    __slots__ = ("e2e", "num_cached", "num_output", "num_prompt", "tpot", "ttft")

    def __init__(self) -> None:
        self.ttft = Histogram(TTFT_S)
        self.tpot = Histogram(GAP_S)
        self.e2e = Histogram(E2E_S)
        self.num_prompt = 0
        self.num_cached = 0
        self.num_output = 0


class GatewayMetrics:
    """All counters. Who counts adds to the attributes, or calls a method where several belong together.

    `workers_file` and `descriptors` are shown as they are when the page is made; None where there is no file."""

    def __init__(self, workers_file: WorkersFile | None = None, descriptors: Descriptors | None = None) -> None:
        self._workers_file = workers_file
        self._descriptors = descriptors or Descriptors()
        self.started_at = time.time()
        self.requests: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        """By route, URL of the worker that answered ("" for the gateway itself) and status."""
        self.failed_tries: defaultdict[tuple[str, Phase], int] = defaultdict(int)
        """By URL of the worker and phase."""
        self.legs: defaultdict[tuple[WorkerRole, str, Outcome], int] = defaultdict(int)
        """Legs of prefill-decode pairs, by role, URL of the worker and how they went."""
        self.retries: defaultdict[str, int] = defaultdict(int)
        """Further tries, by reason: a phase, or the status of an answer that was not passed on."""
        self.refused: defaultdict[str, int] = defaultdict(int)
        """Requests that no worker saw, by the code of their error."""
        self.models: dict[str, ModelMetrics] = {}
        self.queue_wait = Histogram(WAIT_S)
        self.num_queued = 0
        """Requests that queue now."""
        self.num_clients_gone = 0
        """Requests whose client left before their answer was complete."""
        self.num_connections = 0
        """Clients' connections that are open now."""
        self.num_accepted = 0
        """Clients' connections ever taken."""
        self.num_log_lines_dropped = 0
        """Lines of the access log that could not be written."""

    def answered(self, route: str, worker: str, status: int) -> None:
        """A request on `route` was answered with `status`, by the worker at URL `worker` or ("") by the gateway."""
        self.requests[route, worker, status] += 1

    def generated(
        self, model: str, num_prompt: int, num_output: int, e2e_s: float, ttft_s: float | None, num_cached: int = 0
    ) -> None:
        """An answer with tokens is complete, `e2e_s` seconds after its request came in.

        `ttft_s`: until its first token, None where the answer came in one piece; `num_output`, `num_cached` (of
        the prompt's): 0 where not known."""
        metrics = self.models.get(model) or self._model(model)
        metrics.e2e.observe(e2e_s)
        metrics.num_prompt += num_prompt
        metrics.num_output += num_output
        metrics.num_cached += num_cached
        if ttft_s is not None:
            metrics.ttft.observe(ttft_s)
            if num_output > 1:
                metrics.tpot.observe((e2e_s - ttft_s) / (num_output - 1))

    def _model(self, model: str) -> ModelMetrics:
        name = model if len(self.models) < MAX_MODELS else OTHER_MODELS
        return self.models.setdefault(name, ModelMetrics())

    def page(self, fleet: Fleet, now: float) -> bytes:
        """Everything as Prometheus reads it; `now` is of the clock that the fleet's loads are dated by."""
        self._forget_former({worker.url for worker in fleet.workers})
        page = Page()
        self._requests(page)
        self._latencies(page)
        fleet_families(page, PREFIX, fleet, now)
        if self._workers_file is not None:
            is_taken = int(self._workers_file.error is None)
            page.value(f"{PREFIX}workers_file_ok", "gauge", "0 while the workers' file is wrong or gone", is_taken)
        self._process(page)
        return page.text()

    def _requests(self, page: Page) -> None:
        requests = (
            ((("route", route), ("worker", worker), ("code", str(status))), count)
            for (route, worker, status), count in self.requests.items()
        )
        page.family(f"{PREFIX}requests_total", "counter", "Requests answered", requests)
        failed = (
            ((("worker", worker), ("phase", phase)), count) for (worker, phase), count in self.failed_tries.items()
        )
        page.family(f"{PREFIX}failed_tries_total", "counter", "Tries that failed, by phase", failed)
        legs = (
            ((("role", role), ("worker", worker), ("outcome", outcome)), count)
            for (role, worker, outcome), count in self.legs.items()
        )
        page.family(f"{PREFIX}pair_legs_total", "counter", "Halves of requests run by pairs", legs)
        page.family(f"{PREFIX}retries_total", "counter", "Further tries", _by("reason", self.retries))
        page.family(f"{PREFIX}refused_total", "counter", "Requests that no worker saw", _by("code", self.refused))
        for name, help_text, value in (
            ("clients_gone_total", "Requests whose client left before the end", self.num_clients_gone),
            ("accepted_connections_total", "Connections of clients, ever", self.num_accepted),
            ("out_of_descriptors_total", "Connections that the gateway itself lacked", self._descriptors.num_lacked),
            ("log_lines_dropped_total", "Lines of the access log not written", self.num_log_lines_dropped),
        ):
            page.value(f"{PREFIX}{name}", "counter", help_text, value)
        page.value(f"{PREFIX}connections", "gauge", "Connections of clients now", self.num_connections)
        page.value(f"{PREFIX}queue_length", "gauge", "Requests that queue", self.num_queued)
        page.histograms(f"{PREFIX}queue_wait_seconds", "How long requests queued that did", [((), self.queue_wait)])

    def _latencies(self, page: Page) -> None:
        models = [((("model", name),), metrics) for name, metrics in self.models.items()]
        for name, help_text, series in (
            ("time_to_first_token", "From request to first token", [(key, each.ttft) for key, each in models]),
            ("time_per_output_token", "Mean gap between tokens", [(key, each.tpot) for key, each in models]),
            ("e2e_request_latency", "From request to last token", [(key, each.e2e) for key, each in models]),
        ):
            page.histograms(f"{PREFIX}{name}_seconds", help_text, series)
        prompts = [(key, each.num_prompt) for key, each in models]
        page.family(f"{PREFIX}prompt_tokens_total", "counter", "Prompt tokens of answered requests", prompts)
        cached = [(key, each.num_cached) for key, each in models]
        page.family(f"{PREFIX}cached_tokens_total", "counter", "Those of them that workers had cached", cached)
        outputs = [(key, each.num_output) for key, each in models]
        page.family(f"{PREFIX}output_tokens_total", "counter", "Tokens of answers", outputs)

    def _process(self, page: Page) -> None:
        python = "{}.{}.{}".format(*sys.version_info)
        build: Labels = (("version", __version__), ("python", python))
        page.family(f"{PREFIX}build_info", "gauge", "Which gateway this is", [(build, 1)])
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = usage.ru_utime + usage.ru_stime
        page.value("process_cpu_seconds_total", "counter", "CPU time used", cpu_s)
        page.value("process_start_time_seconds", "gauge", "When it started, since 1970", self.started_at)
        page.family("process_resident_memory_bytes", "gauge", "Memory in use", _resident_bytes())
        page.family("process_open_fds", "gauge", "Open files and connections", _open_fds())

    def _forget_former(self, urls: set[str]) -> None:
        """Keep what was counted of the workers at `urls`, and of the last MAX_FORMER_WORKERS others."""
        counted = dict.fromkeys(worker for _, worker, _ in self.requests)
        counted |= dict.fromkeys(worker for worker, _ in self.failed_tries)
        counted |= dict.fromkeys(worker for _, worker, _ in self.legs)
        former = [worker for worker in counted if worker and worker not in urls]
        gone = frozenset(former[:-MAX_FORMER_WORKERS])
        for request in [key for key in self.requests if key[1] in gone]:
            del self.requests[request]
        for attempt in [key for key in self.failed_tries if key[0] in gone]:
            del self.failed_tries[attempt]
        for leg in [key for key in self.legs if key[1] in gone]:
            del self.legs[leg]


def _by(label: str, counts: dict[str, int]) -> Iterator[tuple[Labels, int]]:
    for value, count in counts.items():
        yield ((label, value),), count


def _resident_bytes() -> list[tuple[Labels, float]]:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return [((), int(file.read().split()[1]) * resource.getpagesize())]
    except OSError:  # no Linux
        return []


def _open_fds() -> list[tuple[Labels, float]]:
    try:
        return [((), len(os.listdir("/proc/self/fd")))]
    except OSError:
        return []
