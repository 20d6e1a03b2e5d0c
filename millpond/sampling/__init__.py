"""From a row of logits to one token. Knows parameters, ids and numpy rows; no text, no scheduling."""

from millpond.sampling.processors import LogitsProcessor
from millpond.sampling.sampler import SampledToken, Sampler, SamplerFactory

__all__ = ["LogitsProcessor", "SampledToken", "Sampler", "SamplerFactory"]
