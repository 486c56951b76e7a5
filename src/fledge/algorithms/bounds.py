"""Types of the numbers that losses and corrections take.

`plugins.check_arguments` validates a recipe's arguments by these, so that an impossible value is
refused under its key before any work, and no function checks its own arguments.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
PositiveShare = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
AtLeastOne = Annotated[float, Field(ge=1, allow_inf_nan=False)]
AboveOne = Annotated[float, Field(gt=1, allow_inf_nan=False)]
