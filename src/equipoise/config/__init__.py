"""Settings: frozen dataclasses, one per part. A field's docstring is its help text and names its unit.

Files, environment and flags are folded into these by `equipoise.cli`; nothing else reads them.
"""

from equipoise.config.cost import CostConfig
from equipoise.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    OrderName,
    RanksConfig,
    SchedulerConfig,
    SimExecutorConfig,
)
from equipoise.config.server import ServerConfig

__all__ = [
    "CacheConfig",
    "CostConfig",
    "EngineConfig",
    "ModelConfig",
    "OrderName",
    "RanksConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SimExecutorConfig",
]
