"""The discriminator step frequency of a GAN, fixed or adaptive: the number of D steps for each G step.

Bie, Kamath & Zhang, "Private GANs, Revisited" (TMLR 2023), section 6.2. D is the discriminator, G the generator.
"""

from __future__ import annotations

import math
from typing import Any, Literal

LADDER = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)  # the values of the authors' code


class StepFrequency:
    """n_d, the number of D steps for each G step. It is fixed, or increases along LADDER while D is too weak.

    Before each G step the accuracy of D on new generated images enters an exponential moving average, which starts at
    the first value and is also kept for a fixed n_d. After a G step, n_d increases to the next value of LADDER if the
    average is at or below `threshold` and at least 2 / (1 - beta) G steps were made since the last increase. It never
    decreases, and an increase does not reset the average.

    Args:
        n_d: A fixed n_d, or "adaptive" to start at 1.
        beta: Decay of the average.
        threshold: The accuracy at or below which n_d increases.
    """

    def __init__(self, n_d: int | Literal["adaptive"], beta: float = 0.99, threshold: float = 0.6) -> None:
        self.adaptive = n_d == "adaptive"
        self.n_d = LADDER[0] if self.adaptive else int(n_d)
        self.beta, self.threshold = beta, threshold
        # 2 / (1 - 0.9) is 20.000000000000004 in floating point: without rounding, the period would be 21.
        self.grace = math.ceil(round(2.0 / (1.0 - beta), 9))
        self.d_steps = 0  # since the last G step
        self.g_steps = 0  # since n_d last increased
        self.ema: float | None = None

    def after_d_step(self) -> bool:
        """Count one D step, and return whether a G step is due (for a fixed n_d: whether n_d divides t)."""
        self.d_steps += 1
        return self.d_steps >= self.n_d

    def before_g_step(self, accuracy: float) -> float:
        """Add D's accuracy on new generated images to the moving average, and return the average."""
        self.ema = accuracy if self.ema is None else self.beta * self.ema + (1.0 - self.beta) * accuracy
        return self.ema

    def after_g_step(self) -> None:
        """Count one G step, and increase n_d if the average is low enough and the last increase long enough ago."""
        self.d_steps = 0
        self.g_steps += 1
        weak = self.ema is not None and self.ema <= self.threshold
        if self.adaptive and weak and self.g_steps >= self.grace and self.n_d < LADDER[-1]:
            self.n_d = LADDER[LADDER.index(self.n_d) + 1]
            self.g_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes during training."""
        return {"n_d": self.n_d, "d_steps": self.d_steps, "g_steps": self.g_steps, "ema": self.ema}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state to one that `state_dict` returned."""
        self.n_d, self.d_steps, self.g_steps = state["n_d"], state["d_steps"], state["g_steps"]
        self.ema = state["ema"]
