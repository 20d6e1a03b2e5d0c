"""Where a model file comes from. Knows registry, cache folder and checksums; nothing of loading or running."""

from millpond.models.cache import CachedModel, ModelCache, default_home
from millpond.models.fetch import PullTools
from millpond.models.gguf_check import check_gguf
from millpond.models.progress import Progress, SilentProgress, TerminalProgress
from millpond.models.registry import REGISTRY, RegisteredModel
from millpond.models.resolve import ResolvedModel, cached_models, remove_model, resolve_model

__all__ = [
    "REGISTRY",
    "CachedModel",
    "ModelCache",
    "Progress",
    "PullTools",
    "RegisteredModel",
    "ResolvedModel",
    "SilentProgress",
    "TerminalProgress",
    "cached_models",
    "check_gguf",
    "default_home",
    "remove_model",
    "resolve_model",
]
