"""Types of values that several tables have."""

from typing import Annotated

import msgspec

from runtime.settings.reading.access import Harmless

Positive = Harmless[Annotated[int, msgspec.Meta(ge=1)]]
Count = Harmless[Annotated[int, msgspec.Meta(ge=0)]]
Fraction = Harmless[Annotated[float, msgspec.Meta(ge=0, le=1)]]
NonNegative = Harmless[Annotated[float, msgspec.Meta(ge=0)]]
Temperature = Harmless[Annotated[float, msgspec.Meta(gt=0)]]
TopP = Harmless[Annotated[float, msgspec.Meta(gt=0, le=1)]]
TopK = Harmless[Annotated[int, msgspec.Meta(ge=-1)]]  # -1: off
Text = Annotated[str, msgspec.Meta(min_length=1)]
# One token of a subject, and one file name.
Name = Harmless[Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]]


Timeout = Harmless[Annotated[float, msgspec.Meta(ge=1, le=86_400)]]  # seconds; at most a day
Variable = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
