"""Own routes that anyone may ask: is it alive, is it ready, what does it serve, how does it do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from equipoise import __version__
from equipoise.errors import UnavailableError
from equipoise.gateway.own import OwnAnswer, OwnRoute, json_answer
from equipoise.gateway.views import count_states, is_ready, merged_models, model_card
from equipoise.obs.page import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import Callable

    from equipoise.gateway.fleet import Fleet
    from equipoise.gateway.metrics import GatewayMetrics
    from equipoise.gateway.request import ClientRequest
    from equipoise.gateway.router import Router


class Probes:
    """The handlers. `clock` is the event loop's; `is_closing` is set when the gateway is told to stop."""

    def __init__(self, fleet: Fleet, router: Router, metrics: GatewayMetrics, clock: Callable[[], float]) -> None:
        self.is_closing = False
        self._fleet = fleet
        self._router = router
        self._metrics = metrics
        self._clock = clock

    def routes(self, *, has_metrics: bool) -> list[OwnRoute]:
        """The routes to register."""
        routes = [
            OwnRoute("/health", {b"GET": self.health}),
            OwnRoute("/liveness", {b"GET": self.health}),
            OwnRoute("/readiness", {b"GET": self.readiness}),
            OwnRoute("/health_generate", {b"GET": self.readiness}),
            OwnRoute("/v1/models", {b"GET": self.models}),
            OwnRoute("/v1/models/{name}", {b"GET": self.model}),
            OwnRoute("/get_server_info", {b"GET": self.info}),
            OwnRoute("/server_info", {b"GET": self.info}),
        ]
        if has_metrics:
            routes.append(OwnRoute("/metrics", {b"GET": self.metrics}))
        return routes

    async def health(self, request: ClientRequest, name: str) -> OwnAnswer:
        """200 as long as the process answers."""
        return json_answer({"status": "ok"})

    async def readiness(self, request: ClientRequest, name: str) -> OwnAnswer:
        """200 while a request could be served; 503 when no worker is ready, and while the gateway stops."""
        if self.is_closing:
            raise UnavailableError("the gateway is shutting down")
        if not is_ready(self._fleet, self._clock()):
            states = ", ".join(f"{count} {state}" for state, count in count_states(self._fleet).items())
            raise UnavailableError(f"no worker takes requests: {states or 'there is none'}")
        return json_answer({"status": "ready", "workers": count_states(self._fleet)})

    async def models(self, request: ClientRequest, name: str) -> OwnAnswer:
        """The models of all workers that are up."""
        found = merged_models(self._fleet, self._metrics.started_at)
        return json_answer({"object": "list", "data": list(found.values())})

    async def model(self, request: ClientRequest, name: str) -> OwnAnswer:
        """One of them, by its name."""
        return json_answer(model_card(self._fleet, self._metrics.started_at, name))

    async def metrics(self, request: ClientRequest, name: str) -> OwnAnswer:
        """The page for Prometheus."""
        page = self._metrics.page(self._fleet, self._clock())
        return OwnAnswer(200, page, [(b"content-type", CONTENT_TYPE)])

    async def info(self, request: ClientRequest, name: str) -> OwnAnswer:
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
