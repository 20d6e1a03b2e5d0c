"""What happens to candidates between the filters and the draw: XTC, then the temperature, fixed or dynamic.

Knows logits of candidates, most probable first; no ids. Order and formulas are llama.cpp's; the randomness of XTC comes
in as a number.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from millpond.sampling_params import DynamicTemperature

Values = NDArray[np.float64]
MAX_XTC_THRESHOLD = 0.5
"""Above it at most one candidate can reach the threshold, so nothing is ever left out."""


def softmax(logits: Values) -> Values:
    """`logits`: largest first."""
    weights = np.exp(logits - logits[0])
    return weights / weights.sum()


def obvious_choices(logits: Values, threshold: float) -> int:
    """How many candidates XTC leaves out, from the first on: all that reach the threshold, but the last of them."""
    if threshold > MAX_XTC_THRESHOLD or len(logits) < 2:
        return 0
    reaching = int(np.count_nonzero(softmax(logits) >= threshold))
    return max(0, reaching - 1)


def dynamic_temperature(logits: Values, temperature: float, spec: DynamicTemperature) -> float:
    """0 means: the first candidate alone."""
    low = max(0.0, temperature - spec.spread)
    high = temperature + spec.spread
    if len(logits) < 2:
        return temperature
    probabilities = softmax(logits)
    possible = probabilities[probabilities > 0.0]
    entropy = -float((possible * np.log(possible)).sum()) / math.log(len(logits))
    return low + (high - low) * max(0.0, entropy) ** spec.exponent
