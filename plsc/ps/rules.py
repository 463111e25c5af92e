"""Rules of a sparse table: the optimizers that turn a key's gradient into a new row, each with its constants."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np


@dataclass(frozen=True)
class Rule:
    """What every built-in rule has; the learning rate is the table's, so that a schedule is one assignment a step.

    weight_decay * value is added to the gradient; then its row is clipped to 2-norm `clip_norm`, then each component
    to +-`clip_value` (0: no clipping).
    """

    name: ClassVar[str] = ""

    weight_decay: float = 0.0
    clip_norm: float = 0.0
    clip_value: float = 0.0

    def __post_init__(self) -> None:
        for name, value in self.constants().items():
            number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            if not (number and 0 <= value <= float(np.finfo(np.float32).max)):
                raise ValueError(f"{type(self).__name__}: got {name}={value!r}, expected a finite float32, 0 or more")
            object.__setattr__(self, name, float(value))  # a number of numpy's would not go into a save
            if name == "eps" and np.float32(value + getattr(self, "initial", 0.0)) == 0:
                raise ValueError(
                    f"{type(self).__name__}: got eps={value}, expected a positive float32: no gradient would be 0 / 0"
                )
            if name in ("momentum", "beta1", "beta2") and value >= 1:
                raise ValueError(f"{type(self).__name__}: got {name}={value}, expected less than 1")

    def constants(self) -> dict[str, Any]:
        return asdict(self)

    def options(self, dim: int) -> dict[str, Any]:
        """What the native core reads."""
        return {"kind": self.name, **asdict(self)}


@dataclass(frozen=True)
class SGD(Rule):
    """w -= lr * g, as torch.optim.SGD. No state."""

    name = "sgd"


@dataclass(frozen=True)
class Momentum(Rule):
    """buf = momentum * buf + g; w -= lr * buf, as torch.optim.SGD without dampening. State: dim floats."""

    name = "momentum"

    momentum: float = 0.9


@dataclass(frozen=True)
class Adagrad(Rule):
    """sum += g^2; w -= lr * g / (sqrt(sum) + eps), as torch.optim.Adagrad. State: dim floats, starting at `initial`."""

    name = "adagrad"

    eps: float = 1e-10
    initial: float = 0.0


@dataclass(frozen=True)
class RowAdagrad(Rule):
    """Adagrad with one sum a row, of the mean of g^2 (FBGEMM's row-wise Adagrad). State: one float."""

    name = "row_adagrad"

    eps: float = 1e-10
    initial: float = 0.0


@dataclass(frozen=True)
class Adam(Rule):
    """torch.optim.Adam on rows that have a gradient, each with a step count of its own. State: 2 * dim + 1 floats."""

    name = "adam"

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass(frozen=True)
class AdamW(Rule):
    """Adam as above, but weight_decay takes lr * weight_decay off the value itself, as torch.optim.AdamW."""

    name = "adamw"

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass(frozen=True)
class FTRL(Rule):
    """FTRL-proximal (McMahan et al. 2013, algorithm 1) with alpha = lr; l1 makes weights exactly 0.

    A row whose value is not of its own making (newborn, assigned, added to) starts with the z that gives this value. At
    another lr than at its last step, sigma is the difference of the two 1 / eta: a gradient of 0 moves nothing.
    State: 2 * dim + 1 floats.
    """

    name = "ftrl"

    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0


class PythonRule(ABC):
    """A rule of your own: numpy on many rows at once. Slower than the native ones by what Python and copies cost."""

    name: str = "python"  # written into saved tables, compared when one is loaded

    @abstractmethod
    def state_size(self, dim: int) -> int:
        """Floats of state a row; they start as zeros."""

    @abstractmethod
    def update(self, values: np.ndarray, state: np.ndarray, grads: np.ndarray, lr: float) -> None:
        """Change values [K, dim] and state [K, state_size] in place by grads [K, dim]; every row is another key's.

        A row that is not finite then is refused: it stays as it was.
        """


RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (SGD, Momentum, Adagrad, RowAdagrad, Adam, AdamW, FTRL)}


def as_rule(rule: str | Rule | PythonRule) -> Rule | PythonRule:
    """A rule by its name, or what is one already."""
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"rule: got {rule!r}, expected one of {', '.join(RULES)}")
        return RULES[rule]()
    if isinstance(rule, PythonRule) or (isinstance(rule, Rule) and rule.name):
        return rule
    raise ValueError(
        f"rule: got {rule!r}, expected one of {', '.join(RULES)}, a rule of plsc.ps, a NativeRule or a PythonRule"
    )


def core_options(rule: Rule | PythonRule, dim: int) -> dict[str, Any]:
    """The rule as the native core takes it, for rows of `dim` components."""
    if isinstance(rule, PythonRule):
        return {"kind": "custom", "custom_state": check_state(rule.state_size(dim))}
    return rule.options(dim)


def check_state(size: int) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= 1 << 20:
        raise ValueError(f"state_size: got {size!r}, expected a whole number from 0 to {1 << 20}")
    return size


def describe(rule: Rule | PythonRule) -> dict[str, Any]:
    """The rule as files and servers tell of it."""
    return {"name": rule.name, **({} if isinstance(rule, PythonRule) else rule.constants())}


def rule_of_save(described: dict[str, Any], state: int, dim: int, given: Rule | PythonRule | None) -> Rule | PythonRule:
    """The rule a table was saved with: made anew, or `given` where it is the user's own; ValueError if not that one."""
    name = described["name"]
    if given is None and name in RULES:
        return RULES[name](**{key: value for key, value in described.items() if key != "name"})
    if name in RULES:
        raise ValueError(f"was saved with the rule {name!r} and its constants, got rule={given!r}; leave rule out")
    if given is None or given.name != name or _own_state(given, dim) != state:
        got = None if given is None else given.name
        raise ValueError(f"was saved with the rule {name!r}, got {got!r}; give rule= that one")
    return given


def _own_state(rule: Rule | PythonRule, dim: int) -> int:
    """Floats of state a row under a rule of the user's own."""
    return rule.state_size(dim) if isinstance(rule, PythonRule) else int(rule.options(dim).get("custom_state", 0))
