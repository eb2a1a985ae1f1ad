"""Own routes that anyone may ask: is it alive, is it ready, what does it serve, how does it do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from equipoise import __version__
from equipoise.errors import UnavailableError
from equipoise.gateway.operate.own import json_answer, name_in_path
from equipoise.gateway.operate.views import count_states, is_ready, merged_models, model_card
from equipoise.gateway.relay.routes import Answer
from equipoise.obs.page import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import Callable

    from equipoise.gateway.fleet.fleet import Fleet
    from equipoise.gateway.fleet.router import Router
    from equipoise.gateway.http.request import ClientRequest
    from equipoise.gateway.operate.metrics import GatewayMetrics
    from equipoise.gateway.relay.routes import Routes

MODEL_PATH = "/v1/models/"


class Probes:
    """The handlers. `clock` is the event loop's; `is_closing` is set when the gateway is told to stop."""

    def __init__(self, fleet: Fleet, router: Router, metrics: GatewayMetrics, clock: Callable[[], float]) -> None:
        self.is_closing = False
        self._fleet = fleet
        self._router = router
        self._metrics = metrics
        self._clock = clock

    def register(self, routes: Routes, *, has_metrics: bool) -> None:
        """Add the handlers to `routes`."""
        for path, handler in (
            ("/health", self.health),
            ("/liveness", self.health),
            ("/readiness", self.readiness),
            ("/health_generate", self.readiness),
            ("/v1/models", self.models),
            (MODEL_PATH, self.model),
            ("/get_server_info", self.info),
            ("/server_info", self.info),
        ):
            routes.own("GET", path, handler)
        if has_metrics:
            routes.own("GET", "/metrics", self.metrics)

    def health(self, request: ClientRequest) -> Answer:
        """200 as long as the process answers."""
        return json_answer({"status": "ok"})

    def readiness(self, request: ClientRequest) -> Answer:
        """200 while a request could be served; 503 when no worker is ready, and while the gateway stops."""
        if self.is_closing:
            raise UnavailableError("the gateway is shutting down")
        if not is_ready(self._fleet, self._clock()):
            states = ", ".join(f"{count} {state}" for state, count in count_states(self._fleet).items())
            raise UnavailableError(f"no worker takes requests: {states or 'there is none'}")
        return json_answer({"status": "ready", "workers": count_states(self._fleet)})

    def models(self, request: ClientRequest) -> Answer:
        """The models of all workers that are up."""
        found = merged_models(self._fleet, self._metrics.started_at)
        return json_answer({"object": "list", "data": list(found.values())})

    def model(self, request: ClientRequest) -> Answer:
        """One of them, by its name."""
        return json_answer(model_card(self._fleet, self._metrics.started_at, name_in_path(request, MODEL_PATH)))

    def metrics(self, request: ClientRequest) -> Answer:
        """The page for Prometheus."""
        page = self._metrics.page(self._fleet, self._clock())
        return Answer(200, page, [(b"content-type", CONTENT_TYPE)])

    def info(self, request: ClientRequest) -> Answer:
        """Version, models, policies, and how many workers are in which state; no addresses and no keys."""
        return json_answer(
            {
                "version": __version__,
                "role": "gateway",
                "started_at": self._metrics.started_at,
                "models": list(merged_models(self._fleet, self._metrics.started_at)),
                "workers": count_states(self._fleet),
                "policies": policies_view(self._router),
            }
        )


def policies_view(router: Router) -> dict[str, Any]:
    """The names of the policies in force, by role."""
    return {
        role: {"policy": router.policies(role).worker_name, "rank_policy": router.policies(role).rank_name}
        for role in router.wants_keys
    }
